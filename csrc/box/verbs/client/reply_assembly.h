// Puts a box's messages together to replies, and finds the request that each of them answers:
// all that a box may send, and nothing of the device that brings it.
//
// A reply is one message, or several in a row when it is longer than a message can be.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"
#include "box/transport/transport.h"

namespace hbm::verbs {

class ReplyAssembly {
 public:
  // From now on each message ends with its tag (box/protocol/seal.h).
  void seal(const smb::SealKey& key) { seal_.emplace(key); }

  // Expects the reply to a request, which has to carry the number that this returns.
  uint64_t expect(transport::TransportRequest& request);
  bool idle() const noexcept { return asked_.empty(); }

  // Takes the next message in. Returns the request whose reply is whole, with its outcome, but not
  // yet done; null: there is more to come. Throws transport::Broken when it is no part of a reply
  // to anything.
  transport::TransportRequest* take(std::span<const std::byte> message);

 private:
  std::span<const std::byte> opened(std::span<const std::byte> message);
  bool is_whole(std::span<const std::byte> frame) const;
  const char* malformed(const smb::Header& header) const;
  transport::TransportRequest& answer(std::span<const std::byte> frame);

  std::optional<smb::Seal> seal_;
  std::unordered_map<uint64_t, transport::TransportRequest*> asked_;
  uint64_t last_id_ = 0;
  std::vector<std::byte> partial_;  // of a reply in several messages
};

}  // namespace hbm::verbs
