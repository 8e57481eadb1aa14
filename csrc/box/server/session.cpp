#include "box/server/session.h"

#include <algorithm>
#include <string>
#include <utility>

#include "box/server/request_handler.h"
#include "box/server/tuning.h"

namespace hbm::box::server {
namespace {

[[noreturn]] void refuse(const protocol::Sequence& sequence, const std::string& cause) {
  throw Refusal(protocol::Status::kMalformed,
                "request number " + std::to_string(sequence.number) + " (replies had up to " +
                    std::to_string(sequence.answered) + "): " + cause);
}

}  // namespace

DuplicateRequestCache::Kind DuplicateRequestCache::classify(const protocol::Sequence& sequence) {
  const uint64_t last = applied();
  if (sequence.number == 0 || sequence.number > last + 1) {
    refuse(sequence, "the next one is " + std::to_string(last + 1));
  }
  if (sequence.number <= std::max(answered_, sequence.answered)) {
    refuse(sequence, "it was answered, and the client had the reply");
  }
  if (sequence.answered > last) {
    refuse(sequence, "only " + std::to_string(last) + " were executed");
  }
  if (sequence.number - sequence.answered > protocol::kSequencedInFlight) {
    refuse(sequence,
           "at most " + std::to_string(protocol::kSequencedInFlight) + " may be in flight");
  }
  answered_ = std::max(answered_, sequence.answered);
  while (!replies_.empty() && last - replies_.size() < answered_) replies_.pop_front();
  if (sequence.number > last) return Kind::kNew;
  return sequence.number > restored_ ? Kind::kSaved : Kind::kBeforeRestart;
}

const Reply& DuplicateRequestCache::saved(uint64_t number) const {
  return replies_.at(replies_.size() - 1 - (applied() - number));
}

void DuplicateRequestCache::save(Reply reply) {
  reply.granted.reset();
  replies_.push_back(std::move(reply));
}

Session::Session(const Identity& identity, storage::SessionRecord& record,
                 std::shared_ptr<const void> counted)
    : record(record),
      request_cache(record),
      identity_(identity),
      counted_(std::move(counted)),
      seen_(Clock::now()) {}

bool Session::push(QueuedRequest&& request) {
  const std::lock_guard lock(mutex_);
  if (ended()) {
    throw Refusal(protocol::Status::kExpired, "the session has ended, with its attachments");
  }
  if (request.opcode == protocol::Opcode::kLeave) {
    ended_.store(true, std::memory_order_release);
  } else if (requests_.size() == kMostRequestsPerSession) {
    throw Refusal(protocol::Status::kExhausted, "the session has " +
                                                    std::to_string(kMostRequestsPerSession) +
                                                    " requests waiting, the most that it may have");
  }
  requests_.push_back(std::move(request));
  return !std::exchange(scheduled_, true);
}

QueuedRequest Session::pop() {
  const std::lock_guard lock(mutex_);
  QueuedRequest request = std::move(requests_.front());
  requests_.pop_front();
  return request;
}

bool Session::idle() {
  const std::lock_guard lock(mutex_);
  scheduled_ = !requests_.empty();
  return !scheduled_;
}

SessionAttachment Session::attachment(uint32_t handle) const {
  const std::lock_guard lock(mutex_);
  const auto found = attachments_.find(handle);
  return found == attachments_.end() ? SessionAttachment{} : found->second;
}

void Session::attach(uint32_t handle, SessionAttachment attachment) {
  const std::lock_guard lock(mutex_);
  if (attachments_.size() == kMostAttachmentsPerSession) {
    throw Refusal(protocol::Status::kExhausted, "the session has " +
                                                    std::to_string(kMostAttachmentsPerSession) +
                                                    " attachments, the most that it may have");
  }
  attachments_.emplace(handle, std::move(attachment));
}

SessionAttachment Session::detach(uint32_t handle) {
  const std::lock_guard lock(mutex_);
  auto node = attachments_.extract(handle);
  return node.empty() ? SessionAttachment{} : std::move(node.mapped());
}

std::vector<SessionAttachment> Session::detach_all() {
  const std::lock_guard lock(mutex_);
  std::vector<SessionAttachment> all;
  all.reserve(attachments_.size());
  for (auto& [handle, attachment] : attachments_) all.push_back(std::move(attachment));
  attachments_.clear();
  return all;
}

size_t Session::attachments() const {
  const std::lock_guard lock(mutex_);
  return attachments_.size();
}

std::set<protocol::Id> Session::keys() const {
  const std::lock_guard lock(mutex_);
  std::set<protocol::Id> keys;
  for (const auto& [handle, attachment] : attachments_) keys.insert(attachment.segment->key);
  return keys;
}

std::string Session::host() const {
  const std::lock_guard lock(mutex_);
  return host_;
}

void Session::set_host(const std::string& host) {
  const std::lock_guard lock(mutex_);
  host_ = host;
}

protocol::ClientStats Session::statistics(Clock::time_point now) const {
  const auto idle = std::chrono::duration_cast<std::chrono::milliseconds>(now - seen());
  return {.session = identity_.id,
          .counts = counters.counts(),
          .pid = identity_.pid,
          .attachments = static_cast<uint32_t>(attachments()),
          .transport = static_cast<uint32_t>(identity_.transport),
          .connected = connections.load(std::memory_order_relaxed),
          .idle_ms = static_cast<uint64_t>(std::max<int64_t>(0, idle.count()))};
}

}  // namespace hbm::box::server
