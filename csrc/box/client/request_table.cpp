#include "box/client/request_table.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "box/client/tuning.h"

namespace hbm::box::client {
namespace {

// Returns true if a user waits for the box because of the operation. Pings come from the client
// itself, and a free needs no box: if the box is gone, so is the attachment.
bool needs_box(const ClientOperation& operation) {
  return operation.opcode() != protocol::Opcode::kPing &&
         operation.opcode() != protocol::Opcode::kFree;
}

const char* doubt(const ClientOperation& operation) {
  return operation.number > 0 ? "; it may or may not have been executed" : "";
}

template <class T>
T reply_of(const transport::TransportRequest& request) {
  if (request.reply.size() != sizeof(T)) {
    throw Error(ErrorKind::kNetwork, std::string("the box's reply to ") +
                                         protocol::opcode_name(request.opcode) + " has " +
                                         std::to_string(request.reply.size()) + " bytes, not " +
                                         std::to_string(sizeof(T)));
  }
  return protocol::read_as<T>(request.reply);
}

void forget_reply(transport::TransportRequest& request) {
  request.status = protocol::Status::kOk;
  request.cause.clear();
  request.reply.clear();
  request.payload.clear();
  request.granted.reset();
  request.done.store(false, std::memory_order_relaxed);
}

std::shared_ptr<Attachment> attachment_of(const transport::TransportRequest& request) {
  const auto asked = protocol::read_as<protocol::Alloc>(request.body);
  const auto given = reply_of<protocol::Allocated>(request);
  return std::shared_ptr<Attachment>(new Attachment{
      .key = given.key,
      .size = given.size,
      .handle = asked.handle,
      .created = given.created != 0,
      .read_only = (asked.flags & protocol::Alloc::kReadOnly) != 0,
      .temporary = (asked.flags & protocol::Alloc::kTemporary) != 0,
      .grant = request.granted,
  });
}

}  // namespace

// The connection

void RequestTable::break_off(const std::string& why) {
  if (!status_.up()) return;
  const bool wanted = std::any_of(unfinished_.begin(), unfinished_.end(),
                                  [](const auto& operation) { return needs_box(*operation); });
  status_.broke(why, wanted);
  nothing_left_.notify_all();
  wake_event_.signal();
}

// Issue

void RequestTable::issue(std::span<const OperationPointer> operations) {
  for (const OperationPointer& operation : operations) check(*operation);
  const auto deadline = timeout_.count() > 0 ? Clock::now() + timeout_ : Clock::time_point::max();
  for (const OperationPointer& operation : operations) {
    operation->issued.store(true, std::memory_order_release);
    add(operation, deadline);
  }
}

void RequestTable::check(const ClientOperation& operation) const {
  if (closing_) {
    throw BoxError(BoxError::Cause::kClosed,
                   operation.text() + ": the client of " + status_.box() + " was closed");
  }
  if (operation.opcode() == protocol::Opcode::kFree) return;
  for (const Touch& touch : operation.touches) {
    if (touch.attachment && touch.attachment->state == AttachmentState::kFreed) {
      throw Error(ErrorKind::kInvalid,
                  operation.text() + ": segment " + key_text(touch.attachment->key) + " was freed");
    }
  }
}

void RequestTable::add(const OperationPointer& operation, Clock::time_point deadline) {
  if (operation->opcode() == protocol::Opcode::kFree) {
    Attachment& attachment = *operation->touches[0].attachment;
    if (attachment.state != AttachmentState::kLive) return operation->settle();
    attachment.state = AttachmentState::kFreed;
  }
  if (std::optional<Failure> failure = reason_to_fail(*operation))
    return fail(*operation, *failure);
  if (operation->is_empty()) return operation->settle();
  if (status_.state() == ConnectionStatus::State::kBroken && needs_box(*operation)) status_.warn();
  operation->deadline = deadline;
  earliest_ = std::min(earliest_, deadline);
  operation->position = unfinished_.insert(unfinished_.end(), operation);
  order::add(*operation);
  if (operation->stage == ClientOperation::Stage::kReady) enqueue({operation.get()});
}

std::optional<Failure> RequestTable::reason_to_fail(const ClientOperation& operation) const {
  if (status_.state() == ConnectionStatus::State::kUnreachable) {
    return failure(BoxError::Cause::kUnreachable, operation.text() + ": " + status_.outage());
  }
  for (const Touch& touch : operation.touches) {
    if (touch.attachment && touch.attachment->state == AttachmentState::kLost) {
      return failure(BoxError::Cause::kLost, operation.text() + ": " + touch.attachment->why);
    }
  }
  return std::nullopt;
}

void RequestTable::enqueue(const std::vector<ClientOperation*>& ready) {
  for (ClientOperation* operation : ready) {
    const auto& attachment = operation->touches[0].attachment;
    const bool mapped = operation->is_transfer() && attachment->grant->memory != nullptr;
    auto& queue = mapped ? copies_ : operation->is_sequenced() ? sequenced_ : ready_;
    queue.push_back(*operation->position);
  }
}

// For the progress engine

bool RequestTable::has_work() const {
  return can_progress() &&
         (posted_count() > 0 || !ready_.empty() || !sequenced_.empty() || has_copies());
}

Operations RequestTable::take_ready() {
  Operations taken;
  const auto take = [&](std::deque<OperationPointer>& queue, auto&& room) {
    while (!queue.empty() && room()) {
      OperationPointer operation = std::move(queue.front());
      queue.pop_front();
      if (operation->settled()) {
        finish(std::move(operation));
        continue;
      }
      if (operation->is_sequenced()) {
        operation->number = next_number_++;
        number(*operation);
      } else {
        ++in_flight_;
      }
      enqueue(order::posted(*operation));
      taken.push_back(std::move(operation));
    }
  };
  take(ready_, [&] { return in_flight_ < kUnsequencedInFlight; });
  take(sequenced_, [&] { return outstanding_.size() < protocol::kSequencedInFlight; });
  return taken;
}

void RequestTable::number(ClientOperation& operation) {
  outstanding_.insert(operation.number);
  const protocol::Sequence sequence{.number = operation.number,
                                    .answered = *outstanding_.begin() - 1};
  std::memcpy(operation.request.body.data(), &sequence, sizeof sequence);
}

void RequestTable::complete(OperationPointer operation) {
  const transport::TransportRequest& request = operation->request;
  status_.answered();
  if (operation->number > 0) {
    outstanding_.erase(operation->number);
  } else {
    --in_flight_;
  }
  const bool freed =
      request.opcode == protocol::Opcode::kFree &&
      (request.status == protocol::Status::kOk || request.status == protocol::Status::kNotAttached);
  if (freed) {
    detach(*operation->touches[0].attachment);
  } else if (request.status != protocol::Status::kOk) {
    fail(*operation, failure(request.status, operation->text(), request.cause));
  } else if (!operation->settled()) {
    try {
      if (request.opcode == protocol::Opcode::kAlloc) {
        operation->attachment = attachment_of(request);
        attach(operation->attachment);
      } else if (request.opcode == protocol::Opcode::kFetchAdd) {
        operation->value = reply_of<protocol::Fetched>(request).before;
      } else if (request.opcode == protocol::Opcode::kExists) {
        operation->value = reply_of<protocol::KeyFound>(request).found != 0;
      } else if (request.opcode == protocol::Opcode::kStats) {
        operation->payload = std::move(operation->request.payload);
      }
    } catch (const Error& error) {
      fail(*operation, failure(BoxError::Cause::kRefused, error.what()));
    }
  }
  finish(std::move(operation));
}

void RequestTable::attach(const std::shared_ptr<Attachment>& attachment) {
  std::weak_ptr<std::vector<ClientOperation*>>& unfinished = by_key_[attachment->key];
  attachment->unfinished = unfinished.lock();
  if (!attachment->unfinished) {
    unfinished = attachment->unfinished = std::make_shared<std::vector<ClientOperation*>>();
  }
  attachments_.emplace(attachment->handle, attachment);
}

void RequestTable::detach(const Attachment& attachment) {
  attachments_.erase(attachment.handle);
  const bool last = attachment.unfinished.use_count() == 1;
  if (last) by_key_.erase(attachment.key);
}

OperationPointer RequestTable::take_copy() {
  if (copies_.empty()) return nullptr;
  OperationPointer operation = std::move(copies_.front());
  copies_.pop_front();
  return operation;
}

void RequestTable::finish(OperationPointer operation) {
  enqueue(order::finished(*operation));
  operation->hold.reset();
  unfinished_.erase(operation->position);
  if (!operation->settled()) operation->settle();
  if (closing_) nothing_left_.notify_all();
}

void RequestTable::fail(ClientOperation& operation, Failure failure) {
  if (operation.settled()) return;
  operation.failure = std::move(failure);
  operation.settle();
}

void RequestTable::expire(Clock::time_point now, bool transport) {
  if (now < earliest_) return;
  earliest_ = Clock::time_point::max();
  for (const OperationPointer& operation : unfinished_) {
    if (operation->settled() || operation->expired) continue;
    if (operation->deadline > now) {
      earliest_ = std::min(earliest_, operation->deadline);
      continue;
    }
    const bool posted = operation->stage == ClientOperation::Stage::kPosted;
    if (posted && operation->is_transfer() && transport) {
      operation->expired = true;  // fails once the transport no longer uses its memory
      break_off(timeout_failure(*operation).message);
    } else {
      fail_expired(*operation);
    }
  }
}

Failure RequestTable::timeout_failure(const ClientOperation& operation) const {
  return failure(BoxError::Cause::kTimeout,
                 operation.text() + ": not done within " + std::to_string(timeout_.count()) +
                     " ms by the box at " + status_.box() + doubt(operation));
}

// For the reconnector

bool RequestTable::remembered(uint64_t applied) const {
  const uint64_t oldest = outstanding_.empty() ? next_number_ : *outstanding_.begin();
  return oldest <= applied + 1 && applied < next_number_;
}

std::vector<std::shared_ptr<Attachment>> RequestTable::attachments() const {
  std::vector<std::shared_ptr<Attachment>> attachments;
  for (const auto& [handle, attachment] : attachments_) {
    if (attachment->state != AttachmentState::kLost) attachments.push_back(attachment);
  }
  return attachments;
}

void RequestTable::lose(Attachment& attachment, const std::string& why, bool deleted) {
  for (ClientOperation* operation : *attachment.unfinished) {
    const bool sent = operation->opcode() == protocol::Opcode::kDelete && operation->number > 0;
    if (deleted && sent && !operation->settled()) operation->settle();
  }
  if (attachment.state == AttachmentState::kLost) return;
  attachment.state = AttachmentState::kLost;
  attachment.why = why;
  for (ClientOperation* operation : *attachment.unfinished) {
    if (operation->touches[0].attachment.get() == &attachment &&
        operation->opcode() == protocol::Opcode::kFree) {
      operation->settle();
    } else if (std::optional<Failure> failure = reason_to_fail(*operation)) {
      fail(*operation, *failure);
    }
  }
}

void RequestTable::lose_all(const std::string& why) {
  for (const auto& [handle, attachment] : attachments_) lose(*attachment, why);
}

Operations RequestTable::repost(Operations posted, bool same_session, bool same_generation) {
  Operations again;
  Operations afresh;
  in_flight_ = 0;
  outstanding_.clear();
  if (!same_session) next_number_ = 1;
  for (OperationPointer& operation : posted) {
    const bool refused =
        operation->request.finished() && operation->request.status == protocol::Status::kExpired;
    if (operation->number > 0 && !same_session) {
      operation->number = 0;
      if (operation->opcode() == protocol::Opcode::kFree) {  // the end of the last session freed it
        detach(*operation->touches[0].attachment);
        finish(std::move(operation));
        continue;
      }
      if (!operation->settled() && (refused || !same_generation)) {
        operation->stage = ClientOperation::Stage::kReady;
        afresh.push_back(std::move(operation));
        continue;
      }
      fail(*operation,
           failure(BoxError::Cause::kUnreachable,
                   operation->text() + ": the connection to the box at " + status_.box() +
                       " was lost for longer than the client's lease; it may or may not have been "
                       "executed"));
    }
    if (operation->settled() && operation->number == 0) {
      finish(std::move(operation));
      continue;
    }
    forget_reply(operation->request);
    if (operation->number > 0) {
      number(*operation);
    } else {
      ++in_flight_;
    }
    again.push_back(std::move(operation));
  }
  sequenced_.insert(sequenced_.begin(), afresh.begin(), afresh.end());
  return again;
}

// The end

std::exception_ptr RequestTable::close(Lock& lock, Clock::time_point until,
                                       const std::function<void()>& while_waiting) {
  closing_ = true;
  const auto nothing_left = [&] { return unfinished_.empty() || !status_.up(); };
  for (auto now = Clock::now(); now < until; now = Clock::now()) {
    if (nothing_left_.wait_until(lock, std::min(until, now + kInterruptPeriod), nothing_left))
      break;
    if (!while_waiting) continue;
    lock.unlock();
    std::exception_ptr interrupt;
    try {
      while_waiting();
    } catch (...) {
      interrupt = std::current_exception();
    }
    lock.lock();
    if (interrupt) return interrupt;
  }
  return nullptr;
}

void RequestTable::fail_all(BoxError::Cause cause, const std::string& why) {
  for (const OperationPointer& operation : unfinished_) {
    fail(*operation, failure(cause, operation->text() + ": " + why + doubt(*operation)));
    operation->hold.reset();
    operation->behind_post.clear();
    operation->behind_finish.clear();
    operation->stage = ClientOperation::Stage::kFinished;
    for (const Touch& touch : operation->touches) {
      if (touch.attachment) touch.attachment->unfinished->clear();
    }
  }
  unfinished_.clear();
  ready_.clear();
  sequenced_.clear();
  copies_.clear();
  outstanding_.clear();
  in_flight_ = 0;
}

}  // namespace hbm::box::client
