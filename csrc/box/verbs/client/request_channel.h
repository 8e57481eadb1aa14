// A client's control requests and their replies: frames of box/protocol/protocol.h as messages on
// one lane.
//
// A request is one message. A reply is one too, or several in a row (reply_assembly.h) when it is
// longer than kReplyBytes, for whose further ones the device of the box waits until a buffer is
// free here.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "box/protocol/seal.h"
#include "box/transport/transport.h"
#include "box/verbs/client/reply_assembly.h"
#include "box/verbs/client/verbs_lane.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/domain.h"

namespace hbm::verbs {

class RequestChannel {
 public:
  // Throws as BufferPool.
  explicit RequestChannel(const std::shared_ptr<Domain>& domain);

  // Lets the device put replies here. With `keys`, every message ends with its tag
  // (box/protocol/seal.h). Throws transport::Broken.
  void open(ibv_qp* queue_pair, uint32_t inline_bytes, const std::optional<smb::SealKeys>& keys);

  void put(transport::TransportRequest& request) { unsent_.push_back(&request); }
  bool idle() const noexcept { return unsent_.empty() && assembly_.idle(); }

  // Chains the requests for which there is room.
  void send(VerbsLane& lane);
  void sent(uint32_t slot) { requests_.give(slot); }

  // A message of `bytes` bytes came in the buffer `slot`, which the device gets again. The request
  // that it answers, with its outcome, but not yet done; null: there is more to come.
  // Throws transport::Broken when it is no reply to anything.
  transport::TransportRequest* arrived(uint32_t slot, uint32_t bytes);

 private:
  void receive(uint32_t slot);

  ibv_qp* queue_pair_ = nullptr;
  uint32_t inline_bytes_ = 0;
  std::optional<smb::Seal> of_requests_;
  BufferPool requests_;
  BufferPool replies_;
  std::deque<transport::TransportRequest*> unsent_;
  ReplyAssembly assembly_;
};

}  // namespace hbm::verbs
