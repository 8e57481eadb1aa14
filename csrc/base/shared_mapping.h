// A mapping of another process' file: the segment of a local peer, or a segment of a memory box.
//
// A forked child does not inherit the mapping, because the file's owner does not know the child. A
// stray access in the child faults instead of changing the owner's memory. An inherited object may
// be destroyed in the child, without effect, and must not be used otherwise.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <string>

#include "base/fork.h"

namespace hbm {

class SharedMapping {
 public:
  // Maps the first `bytes` bytes of the file `descriptor`. The caller keeps the descriptor, and may
  // close it immediately. `name` is the memory's name in errors. Throws Error(kExhausted) if
  // address space is short, Error(kUnavailable) if the kernel refuses for another reason.
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
