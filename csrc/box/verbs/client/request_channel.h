// A client's control requests and their replies: frames of box/protocol/protocol.h as messages on
// one queue pair.
//
// A request is one message. A reply is one message, or several in a row if it is longer than
// kReplyBytes (reply_assembly.h); the box's device waits while the client has no free receive
// buffer.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "box/protocol/authenticator.h"
#include "box/transport/transport.h"
#include "box/verbs/client/queue_pair.h"
#include "box/verbs/client/reply_assembly.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/domain.h"

namespace hbm::box::verbs::client {

class RequestChannel {
 public:
  // Throws the errors of BufferPool.
  explicit RequestChannel(const std::shared_ptr<common::Domain>& domain);

  // Posts the receive buffers. With `keys`, every message ends with its tag
  // (box/protocol/authenticator.h). Throws transport::Broken.
  void open(ibv_qp* queue_pair, uint32_t inline_bytes,
            const std::optional<protocol::MacKeys>& keys);

  void put(transport::TransportRequest& request) { unsent_.push_back(&request); }
  bool idle() const noexcept { return unsent_.empty() && assembly_.idle(); }

  // Chains as many requests as fit.
  void send(QueuePair& queue_pair);
  void sent(uint32_t buffer) { requests_.give(buffer); }

  // Processes a message of `bytes` bytes in receive buffer `buffer`, and posts the buffer again.
  // Returns the answered request. All its results are set, except `done`. Returns null if more
  // messages of the reply follow. Throws transport::Broken if the message is no part of an expected
  // reply.
  transport::TransportRequest* arrived(uint32_t buffer, uint32_t bytes);

 private:
  void receive(uint32_t buffer);

  ibv_qp* queue_pair_ = nullptr;
  uint32_t inline_bytes_ = 0;
  std::optional<protocol::Authenticator> request_authenticator_;
  common::BufferPool requests_;
  common::BufferPool replies_;
  std::deque<transport::TransportRequest*> unsent_;
  ReplyAssembly assembly_;
};

}  // namespace hbm::box::verbs::client
