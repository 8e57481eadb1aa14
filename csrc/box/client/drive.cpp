// The driver: posts what is ready, lets the transport move, completes what was answered.
#include <algorithm>
#include <cstring>
#include <utility>

#include "box/client/core.h"
#include "box/client/operation.h"
#include "box/protocol/elements.h"
#include "kernels/copy.h"

namespace hbm::client {
namespace {

constexpr auto kHungAtLeast = std::chrono::seconds(10);
constexpr size_t kCopiedAtATime = 64 << 10;  // bytes, before the driver looks around again
constexpr size_t kMostInFlight = 64;  // requests without a number; the others have smb::kWindow

// How much of a copy is memcpy's: it loads and stores vectors, whose bounds are bounds of elements
// (box/protocol/elements.h) where both ends begin at one. The rest is copied element by element.
struct Cut {
  size_t head;  // bytes up to the first element
  size_t body;  // memcpy's

  Cut(const std::byte* shared, const std::byte* local, size_t bytes)
      : head(std::min(bytes, -reinterpret_cast<uintptr_t>(shared) % sizeof(uint64_t))) {
    const bool alike = reinterpret_cast<uintptr_t>(local + head) % sizeof(uint64_t) == 0;
    body = alike ? (bytes - head) / sizeof(uint64_t) * sizeof(uint64_t) : 0;
  }
};

void read_elements(std::byte* local, const std::byte* shared, size_t bytes) {
  const Cut cut(shared, local, bytes);
  const size_t tail = cut.head + cut.body;
  smb::load_elements(local, shared, cut.head);
  copy_bytes(local + cut.head, shared + cut.head, cut.body);
  smb::load_elements(local + tail, shared + tail, bytes - tail);
}

void write_elements(std::byte* shared, const std::byte* local, size_t bytes) {
  const Cut cut(shared, local, bytes);
  const size_t tail = cut.head + cut.body;
  smb::store_elements(shared, local, cut.head);
  copy_bytes(shared + cut.head, local + cut.head, cut.body);
  smb::store_elements(shared + tail, local + tail, bytes - tail);
}

template <class T>
T reply_of(const transport::TransportRequest& request) {
  if (request.reply.size() != sizeof(T)) {
    throw Error(ErrorKind::kNetwork, std::string("the box's reply to ") +
                                         smb::opcode_name(request.opcode) + " has " +
                                         std::to_string(request.reply.size()) + " bytes, not " +
                                         std::to_string(sizeof(T)));
  }
  return smb::read_as<T>(request.reply);
}

std::shared_ptr<Attachment> attachment_of(const transport::TransportRequest& request) {
  const auto asked = smb::read_as<smb::Alloc>(request.body);
  const auto given = reply_of<smb::Allocated>(request);
  return std::shared_ptr<Attachment>(new Attachment{
      .key = given.key,
      .size = given.size,
      .handle = asked.handle,
      .created = given.created != 0,
      .read_only = (asked.flags & smb::Alloc::kReadOnly) != 0,
      .temporary = (asked.flags & smb::Alloc::kTemporary) != 0,
      .grant = request.granted,
  });
}

// Returns true if the box answers a ping behind the operation immediately. Large memory and a slow
// network delay the others, and kExists waits while another client makes that segment.
bool is_quick(const OperationPointer& operation) {
  return !operation->is_transfer() && operation->opcode() != smb::Opcode::kAlloc &&
         operation->opcode() != smb::Opcode::kExists &&
         operation->opcode() != smb::Opcode::kAccumulate;
}

// Throws Broken if the box says that the session is gone, or soon will be: reconnecting then
// decides about the request.
void stay_or_throw(const transport::TransportRequest& request) {
  if (request.status != smb::Status::kExpired && request.status != smb::Status::kClosing) return;
  throw transport::Broken("the box says: " + (request.cause.empty()
                                                  ? smb::status_name(request.status)
                                                  : request.cause));
}

}  // namespace

void Core::step(Clock::time_point until, bool with_copies) {
  Operations starting;
  bool copying = false;
  {
    const Lock lock(mutex_);
    if (state_ != ConnectionState::kUp || stopping_) return;
    const auto now = Clock::now();
    ping_if_due(now);
    expire(now);
    if (state_ != ConnectionState::kUp) return;
    starting = take_ready(now);
    copying = with_copies && !copies_.empty();
    until = copying ? now : std::min({until, earliest_, next_ping_});
  }
  try {
    send(starting);
    if (!posted_.empty()) {
      transport_->progress(std::max(until - Clock::now(), Clock::duration::zero()));
      take_answers();
    }
  } catch (const std::exception& error) {
    const Lock lock(mutex_);
    return break_off(error.what());
  }
  if (copying) copy_some();
}

void Core::expire(Clock::time_point now) {
  if (now < earliest_) return;
  earliest_ = Clock::time_point::max();
  for (const OperationPointer& operation : unfinished_) {
    if (operation->settled() || operation->expired) continue;
    if (operation->deadline > now) {
      earliest_ = std::min(earliest_, operation->deadline);
      continue;
    }
    const bool posted = operation->stage == ClientOperation::Stage::kPosted;
    if (posted && operation->is_transfer() && transport_) {
      operation->expired = true;  // fails once the transport no longer uses its memory
      break_off(late(*operation).message);
    } else {
      fail(*operation, late(*operation));
    }
  }
}

void Core::ping_if_due(Clock::time_point now) {
  if (now < next_ping_) return;
  next_ping_ = now + lease_ / 3;
  if (ping_ && ping_->stage != ClientOperation::Stage::kFinished) {
    // Behind a long accumulate a ping may wait; else it is answered, or the box hangs.
    const bool alone = in_flight_ + outstanding_.size() == 1;
    const auto patience = alone ? lease_ : std::max<Clock::duration>(lease_, kHungAtLeast);
    const bool hangs = now - pinged_ > patience && std::ranges::all_of(posted_, is_quick);
    if (hangs) break_off("the box does not answer");
    return;
  }
  ping_ = std::make_shared<ClientOperation>(smb::Opcode::kPing);
  pinged_ = now;
  add(ping_, Clock::time_point::max());
}

Core::Operations Core::take_ready(Clock::time_point now) {
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
      if (!operation->is_transfer()) next_ping_ = now + lease_ / 3;
      enqueue(order::posted(*operation));
      taken.push_back(std::move(operation));
    }
  };
  take(ready_, [&] { return in_flight_ < kMostInFlight; });
  take(sequenced_, [&] { return outstanding_.size() < smb::kWindow; });
  return taken;
}

void Core::number(ClientOperation& operation) {
  outstanding_.insert(operation.number);
  const smb::Sequence sequence{.number = operation.number, .answered = *outstanding_.begin() - 1};
  std::memcpy(operation.request.body.data(), &sequence, sizeof sequence);
}

void Core::send(const Operations& operations) {
  posted_.insert(posted_.end(), operations.begin(), operations.end());
  if (!operations.empty()) registered_memory_.register_with(*transport_);
  for (const OperationPointer& operation : operations) {
    if (operation->is_transfer()) {
      operation->request.grant = operation->touches[0].attachment->grant.get();
    }
    transport_->post(operation->request);
  }
}

void Core::take_answers() {
  const auto unfinished = [](const OperationPointer& operation) {
    return !operation->request.finished();
  };
  for (const OperationPointer& operation : posted_) {
    if (!unfinished(operation)) stay_or_throw(operation->request);
  }
  const auto rest = std::stable_partition(posted_.begin(), posted_.end(), unfinished);
  const Operations answered(std::make_move_iterator(rest), std::make_move_iterator(posted_.end()));
  posted_.erase(rest, posted_.end());
  if (answered.empty()) return;
  const Lock lock(mutex_);
  for (const OperationPointer& operation : answered) complete(operation);
}

void Core::complete(OperationPointer operation) {
  const transport::TransportRequest& request = operation->request;
  answered_ = true;
  if (operation->number > 0) {
    outstanding_.erase(operation->number);
  } else {
    --in_flight_;
  }
  const bool freed =
      request.opcode == smb::Opcode::kFree &&
      (request.status == smb::Status::kOk || request.status == smb::Status::kNotAttached);
  if (freed) {
    dismiss(*operation->touches[0].attachment);
  } else if (request.status != smb::Status::kOk) {
    fail(*operation, failure(request.status, operation->text(), request.cause));
  } else if (!operation->settled()) {
    try {
      if (request.opcode == smb::Opcode::kAlloc) {
        operation->attachment = attachment_of(request);
        admit(operation->attachment);
      } else if (request.opcode == smb::Opcode::kFetchAdd) {
        operation->value = reply_of<smb::Fetched>(request).before;
      } else if (request.opcode == smb::Opcode::kExists) {
        operation->value = reply_of<smb::KeyFound>(request).found != 0;
      } else if (request.opcode == smb::Opcode::kStats) {
        operation->payload = std::move(operation->request.payload);
      }
    } catch (const Error& error) {
      fail(*operation, failure(BoxError::Cause::kRefused, error.what()));
    }
  }
  finish(std::move(operation));
}

void Core::admit(const std::shared_ptr<Attachment>& attachment) {
  std::weak_ptr<std::vector<ClientOperation*>>& unfinished = by_key_[attachment->key];
  attachment->unfinished = unfinished.lock();
  if (!attachment->unfinished) {
    unfinished = attachment->unfinished = std::make_shared<std::vector<ClientOperation*>>();
  }
  attachments_.emplace(attachment->handle, attachment);
}

void Core::dismiss(const Attachment& attachment) {
  attachments_.erase(attachment.handle);
  const bool last = attachment.unfinished.use_count() == 1;
  if (last) by_key_.erase(attachment.key);
}

void Core::copy_some() {
  Lock lock(mutex_);
  for (size_t bytes = 0; bytes < kCopiedAtATime && state_ == ConnectionState::kUp;) {
    if (copies_.empty()) return;
    OperationPointer operation = std::move(copies_.front());
    copies_.pop_front();
    const Touch& touch = operation->touches[0];
    bytes += touch.end - touch.begin;
    if (!operation->settled() &&
        !copy(lock, operation->opcode(), touch, operation->request.local)) {
      return copies_.push_front(std::move(operation));
    }
    finish(std::move(operation));
  }
}

bool Core::copy(Lock& lock, smb::Opcode opcode, const Touch& touch, std::byte* local) {
  const std::shared_ptr<transport::Grant> grant = touch.attachment->grant;
  const transport::Transport& transport = *transport_;
  ++copiers_;
  lock.unlock();

  const size_t bytes = touch.end - touch.begin;
  std::byte* remote = grant->memory + touch.begin;
  bool alive = transport.alive();
  if (alive) {
    if (opcode == smb::Opcode::kRead) {
      read_elements(local, remote, bytes);
    } else {
      write_elements(remote, local, bytes);
    }
    alive = transport.alive();
  }

  lock.lock();
  if (--copiers_ == 0) no_copiers_.notify_all();
  if (!alive) break_off("the box is gone");
  return alive;
}

}  // namespace hbm::client
