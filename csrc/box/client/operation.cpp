#include "box/client/operation.h"

#include <algorithm>
#include <cstdio>

#include "base/waiting.h"

namespace hbm::box::client {

std::string key_text(protocol::Id key) {
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
  const bool whole = opcode() == protocol::Opcode::kFree || opcode() == protocol::Opcode::kDelete;
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

namespace order {
namespace {

bool conflict(const Touch& one, const Touch& other) {
  return one.attachment->key == other.attachment->key && (one.changes || other.changes) &&
         one.begin < other.end && other.begin < one.end;
}

bool conflict(const ClientOperation& one, const Touch& touch) {
  return std::any_of(one.touches.begin(), one.touches.end(),
                     [&](const Touch& mine) { return mine.attachment && conflict(mine, touch); });
}

void wait_behind(ClientOperation& earlier, ClientOperation& later) {
  if (!earlier.is_sequenced() || !later.is_sequenced()) {
    earlier.behind_finish.push_back(&later);
  } else if (earlier.stage != ClientOperation::Stage::kPosted) {
    earlier.behind_post.push_back(&later);
  } else {
    return;
  }
  ++later.blockers;
}

std::vector<ClientOperation*> release(std::vector<ClientOperation*>& behind) {
  std::vector<ClientOperation*> ready;
  for (ClientOperation* later : behind) {
    if (--later->blockers > 0) continue;
    later->stage = ClientOperation::Stage::kReady;
    ready.push_back(later);
  }
  behind.clear();
  return ready;
}

}  // namespace

bool blocked(const Touch& touch) {
  const auto& unfinished = *touch.attachment->unfinished;
  return std::any_of(unfinished.begin(), unfinished.end(),
                     [&](const ClientOperation* earlier) { return conflict(*earlier, touch); });
}

void add(ClientOperation& operation) {
  for (const Touch& touch : operation.touches) {
    if (!touch.attachment) continue;
    auto& unfinished = *touch.attachment->unfinished;
    for (ClientOperation* earlier : unfinished) {
      if (earlier != &operation && conflict(*earlier, touch)) wait_behind(*earlier, operation);
    }
    if (unfinished.empty() || unfinished.back() != &operation) unfinished.push_back(&operation);
  }
  operation.stage =
      operation.blockers > 0 ? ClientOperation::Stage::kBlocked : ClientOperation::Stage::kReady;
}

std::vector<ClientOperation*> posted(ClientOperation& operation) {
  operation.stage = ClientOperation::Stage::kPosted;
  return release(operation.behind_post);
}

std::vector<ClientOperation*> finished(ClientOperation& operation) {
  operation.stage = ClientOperation::Stage::kFinished;
  for (const Touch& touch : operation.touches) {
    if (touch.attachment) std::erase(*touch.attachment->unfinished, &operation);
  }
  std::vector<ClientOperation*> ready = release(operation.behind_post);
  const std::vector<ClientOperation*> more = release(operation.behind_finish);
  ready.insert(ready.end(), more.begin(), more.end());
  return ready;
}

}  // namespace order

}  // namespace hbm::box::client
