// Sizes that both ends of a control lane agree on, and what tells completions apart.
#pragma once

#include <cstdint>

#include "box/protocol/protocol.h"

namespace hbm::verbs {

inline constexpr uint32_t kRequestBytes = 512;  // of a buffer for one request
inline constexpr uint32_t kReplyBytes = 4096;   // of a buffer for a reply, or for a part of it
inline constexpr uint32_t kInlineBytes = 220;
static_assert(sizeof(smb::Header) + smb::kMaxBody <= kRequestBytes);

// The upper byte of a work request's wr_id; below, it is a lane's number (client) or a kind (box).
inline constexpr int kTagShift = 56;
inline constexpr uint64_t kReceiveTag = 0xff;
inline constexpr uint64_t kReplyTag = 1;  // below: the slot of a long one, or kNoSlot
inline constexpr uint64_t kBindTag = 2;
inline constexpr uint32_t kNoSlot = UINT32_MAX;

}  // namespace hbm::verbs
