// A file of another process, mapped here: a neighbour's segment, a memory box's.
//
// A forked child does not inherit it: the owner knows nothing of the child, and a stray access
// there faults instead of changing the owner's memory. An inherited object may be destroyed there,
// without effect, and not otherwise used.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <string>

#include "base/fork.h"

namespace hbm {

class SharedMapping {
 public:
  // Maps the first `bytes` bytes behind `descriptor`, which stays the caller's and may be closed at
  // once. `name`: of the memory, for errors.
  // Throws Error(kExhausted) when address space is short, Error(kUnavailable) when the kernel
  // refuses for another reason.
  SharedMapping(int descriptor, size_t bytes, bool writable, const std::string& name);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  std::byte* base() const noexcept { return base_; }
  size_t size() const noexcept { return size_; }

 private:
  const ForkGuard fork_;
  const size_t size_;
  std::byte* base_;
};

}  // namespace hbm
