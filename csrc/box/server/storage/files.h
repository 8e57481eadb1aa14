// File operations of a store, with errors that name the file, and mapped files.
//
// Errors: Error(kUnavailable) if the kernel fails, Error(kExhausted) if the disk is full.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"

namespace hbm::box::server::storage {

// Returns the error for a store that is refused and left unchanged, because no box could have left
// the file at `path` as it is. `found`: the fault.
Error damaged(const std::string& path, const std::string& found);

// A new file has mode 0600.
Descriptor open_file(const std::string& path, int flags);

uint64_t file_bytes(int fd, const std::string& path);

// Allocates disk space for `bytes` of the file, and grows the file to that size if it is shorter.
// Without the space, a write to mapped memory would kill the process with SIGBUS. On a file system
// that cannot allocate space, the call only grows the file, and logs a warning once.
void reserve_file(int fd, uint64_t bytes, const std::string& path);

// Return the number of bytes read, at most `size`.
size_t read_file(int fd, void* bytes, size_t size, const std::string& path);
size_t read_file_at(int fd, void* bytes, size_t size, uint64_t at, const std::string& path);
std::vector<std::byte> whole_file(const std::string& path);

// write_file() writes at the position of the descriptor: at the end of a file that is open with
// O_APPEND. write_file_at() writes at offset `at`, where disk space must be reserved.
void write_file(int fd, const void* bytes, size_t size, const std::string& path);
void write_file_at(int fd, const void* bytes, size_t size, uint64_t at, const std::string& path);
void resize_file(int fd, uint64_t bytes, const std::string& path);
void sync_file(int fd, const std::string& path);

// Renames `from` to `path`. If the process stops during the call, `path` is either the new or the
// old file. With `sync` this also holds if the host stops.
void replace_file(const std::string& from, const std::string& path, bool sync);

// Returns true if another process may have the file open, or mapped, for writing. REQUIRES: this
// process has it neither open nor mapped for writing.
bool may_be_written(const std::string& path);

// Returns when names added to the directory or removed from it are on the disk.
void sync_directory(const std::string& path);

// Memory of a fixed size: private to this process, or a file mapped for reading and writing, whose
// data survive the process. New memory and new files are zero-filled.
//
// Threads: any.
class MappedRegion {
 public:
  MappedRegion() noexcept = default;  // no region

  // Throws Error(kExhausted) if memory is short.
  static MappedRegion in_memory(uint64_t bytes);

  // Creates a file, replacing an existing one. Throws Error(kExhausted) if the disk is full,
  // Error(kUnavailable) if the kernel fails otherwise.
  static MappedRegion create(const std::string& path, uint64_t bytes);

  // Maps an existing file. Throws Error(kExhausted) if it cannot be mapped, Error(kUnavailable) if
  // it is empty or the kernel fails otherwise.
  static MappedRegion open(const std::string& path);

  MappedRegion(MappedRegion&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedRegion& operator=(MappedRegion&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedRegion();

  explicit operator bool() const noexcept { return base_ != nullptr; }
  std::byte* base() const noexcept { return base_; }
  uint64_t size() const noexcept { return size_; }

 private:
  MappedRegion(std::byte* base, uint64_t size) noexcept : base_(base), size_(size) {}

  std::byte* base_ = nullptr;
  uint64_t size_ = 0;
};

// Returns when these bytes of a mapped file are on the disk. Throws Error(kUnavailable) if that
// fails.
void persist(const void* at, uint64_t bytes);

// Reserves descriptors for new clients: each segment uses one, and a client that allocates many
// segments must not lock other clients out.
//
// Throws Error(kExhausted) if a new segment would use one of the reserved descriptors: 64 or an
// eighth of the limit (RLIMIT_NOFILE), whichever is more, but at most half of the limit.
void require_descriptor();

}  // namespace hbm::box::server::storage
