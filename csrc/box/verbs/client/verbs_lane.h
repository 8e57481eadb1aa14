// One connected queue pair of a client, and what was posted on it.
//
// Requests are chained and go out together in flush(). Only each kWorkRequestsPerSignal-th of a
// chain and its last one are signalled: a completion stands for all that were posted before it.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "box/transport/slices.h"
#include "box/transport/transport.h"
#include "box/verbs/common/domain.h"
#include "box/verbs/common/tuning.h"

namespace hbm::verbs {

// A request that the device has not completed, and what it uses until then.
struct Posted {
  std::optional<transport::Slice> slice;  // none: a message
  std::optional<uint32_t> slot;           // a buffer: of the message, or of the transfer
  std::shared_ptr<MemoryRegion> region;   // of registered memory
};

class VerbsLane {
 public:
  // `tag` is in the upper byte of each completion's wr_id.
  VerbsLane(CmId id, uint8_t tag);

  ibv_qp* queue_pair() const noexcept { return id_->qp; }
  uint64_t moving_bytes() const noexcept { return moving_bytes_; }
  bool has_room() const noexcept { return posted_.size() < kQueuePairDepth; }
  bool idle() const noexcept { return posted_.empty(); }

  // REQUIRES: has_room(). Of `request` the opcode, the flag IBV_SEND_INLINE and `wr` count.
  void chain(const ibv_send_wr& request, const ibv_sge& local, Posted what);

  // Throws transport::Broken.
  void flush();

  // A completion with this wr_id came: what is done by it, oldest first.
  std::vector<Posted> completed(uint64_t wr_id);

  // The queue pair is gone, and with it all that was posted.
  std::deque<Posted> destroy();

 private:
  CmId id_;
  const uint64_t tag_;
  uint64_t first_ = 0;  // number of posted_.front()
  uint64_t moving_bytes_ = 0;
  std::deque<Posted> posted_;  // chained ones too
  std::vector<ibv_send_wr> chain_;
  std::vector<ibv_sge> entries_;
};

}  // namespace hbm::verbs
