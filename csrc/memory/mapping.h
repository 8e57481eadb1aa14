// Another process' segment, mapped here to be read and written.
//
// A forked child does not inherit it: the peer knows nothing of the child, and a stray access there
// faults instead of changing the peer's memory. An inherited Mapping object may be destroyed there,
// without effect, and not otherwise used.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <memory>

#include "base/fork.h"

namespace hbm::memory {

class Mapping {
 public:
  // All of the memory behind `fd`, which stays the caller's and may be closed at once. The mapping
  // goes with the last pointer to it.
  // Throws Error(kInvalid) when fd is not a file with bytes in it, Error(kExhausted) when the
  // address space is short, Error(kUnavailable) when the kernel refuses for another reason.
  static std::shared_ptr<Mapping> map(int fd);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const noexcept { return base_; }
  size_t size() const noexcept { return size_; }

 private:
  Mapping() = default;

  const ForkGuard fork_;
  std::byte* base_ = nullptr;
  size_t size_ = 0;
};

}  // namespace hbm::memory
