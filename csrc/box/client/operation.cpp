#include "box/client/operation.h"

#include <cstdio>

#include "base/waiting.h"

namespace hbm::client {

std::string key_text(smb::Id key) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(key.high),
                static_cast<unsigned long long>(key.low));
  return text;
}

std::string ClientOperation::text() const {
  std::string text = verb;
  const Touch& first = touches[0];
  if (!subject.empty()) text += " of " + subject;
  if (!first.attachment) return text;
  const bool whole = opcode() == smb::Opcode::kFree || opcode() == smb::Opcode::kDelete;
  if (!whole) {
    text += " of " + std::to_string(first.end - first.begin) + " bytes at " +
            std::to_string(first.begin);
  }
  return text + " of segment " + key_text(first.attachment->key);
}

void ClientOperation::settle() noexcept {
  settled_.store(1, std::memory_order_release);
  futex_wake(settled_);
}

void ClientOperation::wait_settled(Clock::time_point until) const noexcept {
  for (auto now = Clock::now(); !settled() && now < until; now = Clock::now()) {
    futex_wait(settled_, 0, std::chrono::nanoseconds(until - now));
  }
}

}  // namespace hbm::client
