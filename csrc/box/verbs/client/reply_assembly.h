// Assembles replies from a box's messages, and matches them to requests. Validates every message.
// Does not depend on the device.
//
// A reply is one message, or several in a row if it is longer than a message.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "box/protocol/authenticator.h"
#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::box::verbs::client {

class ReplyAssembly {
 public:
  // Verifies the tag at the end of each message from now on (box/protocol/authenticator.h).
  void authenticate(const protocol::MacKey& key) { authenticator_.emplace(key); }

  // Expects the reply to a request. Returns the id that the request must have.
  uint64_t expect(transport::TransportRequest& request);
  bool idle() const noexcept { return asked_.empty(); }

  // Processes the next message. Returns the request whose reply is complete. All its results are
  // set, except `done`. Returns null if more messages of the reply follow. Throws transport::Broken
  // if the message is no part of an expected reply.
  transport::TransportRequest* take(std::span<const std::byte> message);

 private:
  std::span<const std::byte> verified(std::span<const std::byte> message);
  bool is_whole(std::span<const std::byte> frame) const;
  const char* malformed(const protocol::Header& header) const;
  transport::TransportRequest& answer(std::span<const std::byte> frame);

  std::optional<protocol::Authenticator> authenticator_;
  std::unordered_map<uint64_t, transport::TransportRequest*> asked_;
  uint64_t last_id_ = 0;
  std::vector<std::byte> partial_;  // the messages of an incomplete reply
};

}  // namespace hbm::box::verbs::client
