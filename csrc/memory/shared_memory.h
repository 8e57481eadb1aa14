// Memory that processes share: files in memory (memfds), which other processes are given by their
// descriptor, and mappings of them.
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

// A new file in memory: empty, closed on exec; only its owner's processes can open it anew through
// /proc. Throws Error(kUnavailable) when the kernel gives none, and says so when descriptors have
// run out.
Descriptor make_shared_file(const std::string& name);

// REQUIRES: bytes is a multiple of the page.
// Throws Error(kExhausted) when the size of files (RLIMIT_FSIZE) is too limited for it; it names
// the limits of this process.
void set_size(const Descriptor& file, uint64_t bytes);

// Fixes the size for good: a process that maps the file can rely on it, and makes no access past a
// new end.
// Throws Error(kUnavailable) when the kernel refuses.
void fix_size(const Descriptor& file);

// A sparse file in memory, mapped here and, by its descriptor, in other processes.
//
// Its size is address space; memory is what has been written and not given back. Nothing is left of
// it once the last process that has it open or mapped is gone, however that process ended.
class Memfd {
 public:
  // Makes a file of `size_bytes`, rounded up to pages. 0: four times the machine's memory, because
  // a heap inside cannot use every gap, but at most 1 TiB or the machine's memory, whichever is
  // more, because each process of the node maps all; and no more than the limits of this process
  // allow. Throws Error(kExhausted) when the address space (RLIMIT_AS) or the size of files
  // (RLIMIT_FSIZE) is too limited for it, Error(kUnavailable) when the kernel gives no memfd.
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

// Another process' segment, mapped here to be read and written: all of the memory behind `fd`,
// which stays the caller's and may be closed at once. The mapping goes with the last pointer to it.
// Throws Error(kInvalid) when fd is not a file with bytes in it, and as SharedMapping.
std::shared_ptr<SharedMapping> map_segment(int fd);

}  // namespace hbm::memory
