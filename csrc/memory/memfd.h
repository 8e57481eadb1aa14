// A sparse file in memory, mapped here and, by its descriptor, in other processes.
//
// Its size is address space; memory is what has been written and not given back. Nothing is left of
// it once the last process that has it open or mapped is gone, however that process ended.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/descriptor.h"

namespace hbm::memory {

class Memfd {
 public:
  // Of `size_bytes`, rounded up to pages. 0: four times the machine's memory, because a heap inside
  // cannot use every gap, but at most 1 TiB or the machine's memory, whichever is more, because
  // each process of the node maps all; and no more than the limits of this process allow.
  // Throws Error(kExhausted) when the address space (RLIMIT_AS) or the size of files (RLIMIT_FSIZE)
  // is too limited for it, Error(kUnavailable) when the kernel gives no memfd.
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

}  // namespace hbm::memory
