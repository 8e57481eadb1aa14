// One connected queue pair of a client, and the work requests posted on it.
//
// Requests are chained, and posted together by flush(). In a chain, only every
// kWorkRequestsPerSignal-th request and the last one are signalled, because a completion covers all
// requests posted before it.
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

namespace hbm::box::verbs::client {

// A work request that the device has not completed, and the memory that it uses until then.
struct Posted {
  std::optional<transport::Slice> slice;         // none: a message
  std::optional<uint32_t> buffer;                // the buffer of the message or of the transfer
  std::shared_ptr<common::MemoryRegion> region;  // registered memory
};

class QueuePair {
 public:
  // `tag`: the upper byte of wr_id in each completion.
  QueuePair(common::CmId id, uint8_t tag);

  ibv_qp* get() const noexcept { return id_->qp; }
  uint64_t moving_bytes() const noexcept { return moving_bytes_; }
  bool has_room() const noexcept { return posted_.size() < common::kQueuePairDepth; }
  bool idle() const noexcept { return posted_.empty(); }

  // Chains a request. Uses the opcode, the flag IBV_SEND_INLINE and `wr` of `request`. REQUIRES:
  // has_room().
  void chain(const ibv_send_wr& request, const ibv_sge& local, Posted what);

  // Posts the chain. Throws transport::Broken.
  void flush();

  // Handles completion `wr_id`. Returns all requests that it completes, unsignalled predecessors
  // included, oldest first.
  std::vector<Posted> completed(uint64_t wr_id);

  // Destroys the queue pair. Returns the requests that were in flight.
  std::deque<Posted> destroy();

 private:
  common::CmId id_;
  const uint64_t tag_;
  uint64_t first_ = 0;  // number of posted_.front()
  uint64_t moving_bytes_ = 0;
  std::deque<Posted> posted_;  // including chained requests
  std::vector<ibv_send_wr> chain_;
  std::vector<ibv_sge> entries_;
};

}  // namespace hbm::box::verbs::client
