// The files of a store, mapped ones too, with errors that name the file.
//
// The file operations all throw Error(kUnavailable) when the kernel refuses, Error(kExhausted) when
// the disk is full.
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

namespace hbm::box {

// The error of a store that is refused, with nothing in it changed, since one of its files cannot
// be as a box left it.
Error damaged(const std::string& path, const std::string& found);

// A new file is for its owner alone.
Descriptor open_file(const std::string& path, int flags);

uint64_t file_bytes(int fd, const std::string& path);

// Gives a file room on the disk, and at least that size: memory that is mapped to a file without
// room kills by SIGBUS when it is first written.
void reserve_file(int fd, uint64_t bytes, const std::string& path);

// Returns how many bytes there were, at most `size`.
size_t read_file(int fd, void* bytes, size_t size, const std::string& path);
size_t read_file_at(int fd, void* bytes, size_t size, uint64_t at, const std::string& path);
std::vector<std::byte> whole_file(const std::string& path);

// At the descriptor's position, the start or the end; or at a place that the file has room for.
void write_file(int fd, const void* bytes, size_t size, const std::string& path);
void write_file_at(int fd, const void* bytes, size_t size, uint64_t at, const std::string& path);
void resize_file(int fd, uint64_t bytes, const std::string& path);
void sync_file(int fd, const std::string& path);

// The file of that name is from here on the one at `from`, or still the old one if the process or,
// with `sync`, the host stops meanwhile.
void replace_file(const std::string& from, const std::string& path, bool sync);

// Whether any process may have the file open, or mapped, for writing. REQUIRES: this one has not.
bool may_be_written(const std::string& path);

// Names that were added or removed in it are on the disk.
void sync_directory(const std::string& path);

// Zeroed memory of a fixed size: this process' own, or a file mapped for reading and writing, whose
// contents survive the process.
//
// Threads: what one thread makes, any may use.
class MappedRegion {
 public:
  MappedRegion() noexcept = default;  // none

  // Throws Error(kExhausted) when memory is short.
  static MappedRegion in_memory(uint64_t bytes);

  // A new file; one that was there is replaced. Throws Error(kExhausted) when the disk is full,
  // Error(kUnavailable) when the kernel refuses for another reason.
  static MappedRegion create(const std::string& path, uint64_t bytes);

  // All of a file that is there. Throws Error(kUnavailable).
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

// Returns when the disk has those bytes of a mapped file. Throws Error(kUnavailable) when it fails.
void persist(const void* at, uint64_t bytes);

// Open files that are kept for those who come in: each segment has one, and a client that asked for
// segments until none is left would lock all others out.
//
// Throws Error(kExhausted) when a new segment's descriptor would be one of the last: of 64 or an
// eighth of the limit (RLIMIT_NOFILE), whichever is more.
void require_descriptor();

}  // namespace hbm::box
