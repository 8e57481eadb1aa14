// Memory that processes share: files in memory (memfds), passed to other processes by descriptor,
// and mappings of them.
//
// Threads: everything may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/descriptor.h"
#include "base/shared_mapping.h"

namespace hbm::memory {

// Makes an empty file in memory, closed on exec. Only processes of the same user (and root) can
// reopen it through /proc. Throws Error(kUnavailable) if the kernel refuses, and names the limit if
// descriptors have run out.
Descriptor make_shared_file(const std::string& name);

// Sets the size of a file. REQUIRES: `bytes` is a multiple of the page. Throws Error(kExhausted),
// naming this process' limits, if the limit of file sizes (RLIMIT_FSIZE) is too low.
void set_size(const Descriptor& file, uint64_t bytes);

// Fixes the size permanently. A process that maps the file can rely on the size, and never accesses
// memory beyond a new end. Throws Error(kUnavailable) if the kernel refuses.
void fix_size(const Descriptor& file);

// Returns the bytes of a Memfd that is asked for 0 bytes.
uint64_t default_segment_bytes();

// A sparse file in memory, mapped here and, by its descriptor, in other processes.
//
// Its size is address space; only written pages that were not freed take memory. The kernel frees
// the file with the last process that has it open or mapped, however that process ended.
class Memfd {
 public:
  // Makes a file of `size_bytes`, rounded up to pages. With 0, the size is four times the machine's
  // memory, because a heap inside cannot use every gap. It is at most 1 TiB or the machine's
  // memory, whichever is more, because each process of the node maps all files. Under a limit of
  // this process it is smaller, but not below the least sizes in tuning.h.
  //
  // Throws Error(kExhausted) if the limit of the address space (RLIMIT_AS) or of file sizes
  // (RLIMIT_FSIZE) is too low, Error(kUnavailable) if the kernel refuses a memfd.
  Memfd(const std::string& name, uint64_t size_bytes);
  ~Memfd();
  Memfd(const Memfd&) = delete;
  Memfd& operator=(const Memfd&) = delete;

  std::byte* base() const noexcept { return base_; }
  size_t size() const noexcept { return size_; }
  int fd() const noexcept { return file_.get(); }

 private:
  Memfd() = default;
  void resize(uint64_t size);
  bool map() noexcept;

  Descriptor file_;
  std::byte* base_ = nullptr;
  size_t size_ = 0;
};

// Maps another process' segment for reading and writing: all memory of the file `fd`. The caller
// keeps `fd`, and may close it immediately. The mapping ends with the last reference to it. Throws
// Error(kInvalid) if `fd` is not a regular file or is empty. Also throws the errors of
// SharedMapping's constructor.
std::shared_ptr<SharedMapping> map_segment(int fd);

}  // namespace hbm::memory
