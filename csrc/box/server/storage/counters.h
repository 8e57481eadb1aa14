// Counts of operations, by many threads; each count on its own, relaxed.
//
// Threads: every member may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "box/protocol/protocol.h"

namespace hbm::box {

class Counters {
 public:
  void count(smb::Opcode opcode, uint64_t bytes) noexcept;  // kRead, kWrite, kAccumulate, kFetchAdd
  smb::Counts counts() const noexcept;

 private:
  using Count = std::atomic<uint64_t>;
  Count reads_{0}, read_bytes_{0};
  Count writes_{0}, written_bytes_{0};
  Count accumulates_{0}, accumulated_bytes_{0};
  Count fetch_adds_{0};
};

}  // namespace hbm::box
