#include "box/client/progress_engine.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "box/client/tuning.h"
#include "box/protocol/elements.h"
#include "kernels/copy.h"

namespace hbm::box::client {
namespace {

protocol::Stores stores_of(size_t bytes) {
  return bytes >= kernels::non_temporal_bytes() ? protocol::Stores::kNonTemporal
                                                : protocol::Stores::kCached;
}

// Returns true if the operation does not delay the reply to a ping that is sent after it.
// Transfers, kAlloc and kAccumulate can take long, because they touch much memory, or because the
// network is slow. A kExists waits while another client creates or deletes the segment of its key.
bool is_quick(const OperationPointer& operation) {
  return !operation->is_transfer() && operation->opcode() != protocol::Opcode::kAlloc &&
         operation->opcode() != protocol::Opcode::kExists &&
         operation->opcode() != protocol::Opcode::kAccumulate;
}

// Throws Broken if the box reports that the session has ended, or that the box is closing. The
// reconnector then decides whether to send the request again.
void stay_or_throw(const transport::TransportRequest& request) {
  if (request.status != protocol::Status::kExpired && request.status != protocol::Status::kClosing)
    return;
  throw transport::Broken("the box says: " + (request.cause.empty()
                                                  ? protocol::status_name(request.status)
                                                  : request.cause));
}

}  // namespace

ProgressEngine::ProgressEngine(std::function<void()> while_waiting, RequestTable& table)
    : while_waiting_(std::move(while_waiting)), table_(table) {}

void ProgressEngine::require_parent() const {
  if (!fork_.in_child()) return;
  throw Error(ErrorKind::kUnavailable,
              "a forked child cannot use its parent's connection to the box at " +
                  table_.status().box() + ": connect again in the child");
}

// Issue and wait

void ProgressEngine::issue(std::span<const OperationPointer> operations, bool waits) {
  require_parent();
  {
    const auto lock = table_.lock();
    table_.issue(operations);
  }
  if (waits) return;
  if (const Hold held = try_hold()) {
    step(Clock::now(), false);
  } else {
    const auto lock = table_.lock();
    wake();
  }
  leave_to_reconnector();
}

bool ProgressEngine::wait(ClientOperation& operation, Clock::time_point until) {
  require_parent();
  if (!operation.settled() && !operation.issued.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kInvalid,
                operation.text() + ": it was not issued yet; wait for it after its batch");
  }
  bool notified = false;
  while (!operation.settled()) {
    const auto now = Clock::now();
    if (now >= until) return false;
    const auto pause = while_waiting_ ? std::min(until, now + kInterruptPeriod) : until;
    if (const Hold held = try_hold()) {
      const auto goes_on = [&] {
        const auto lock = table_.lock();
        return table_.has_work();
      };
      while (!operation.settled() && Clock::now() < pause && goes_on()) step(pause, true);
    } else if (!std::exchange(notified, true)) {
      const auto lock = table_.lock();
      wake();
    }
    leave_to_reconnector();
    operation.wait_settled(pause);
    if (!operation.settled() && while_waiting_) while_waiting_();
  }
  return true;
}

void ProgressEngine::leave_to_reconnector() {
  const auto lock = table_.lock();
  if (table_.has_work()) table_.wake_event().signal();
}

void ProgressEngine::wake() const noexcept {
  if (transport_) transport_->wake();
}

// A turn

void ProgressEngine::step(Clock::time_point until, bool with_copies) {
  Operations starting;
  bool copying = false;
  {
    const auto lock = table_.lock();
    if (!table_.can_progress()) return;
    const auto now = Clock::now();
    ping_if_due(now);
    table_.expire(now, /*transport=*/true);
    if (!table_.can_progress()) return;
    starting = table_.take_ready();
    const bool renews = std::any_of(starting.begin(), starting.end(),
                                    [](const auto& each) { return !each->is_transfer(); });
    if (renews) next_ping_ = now + lease_ / kPingsPerLease;
    copying = with_copies && table_.has_copies();
    until = copying ? now : std::min({until, table_.earliest_deadline(), next_ping_});
  }
  try {
    post(starting);
    if (!posted_.empty()) {
      transport_->progress(std::max(until - Clock::now(), Clock::duration::zero()));
      take_answers();
    }
  } catch (const std::exception& error) {
    const auto lock = table_.lock();
    return table_.break_off(error.what());
  }
  if (copying) copy_some();
}

void ProgressEngine::ping_if_due(Clock::time_point now) {
  if (now < next_ping_) return;
  next_ping_ = now + lease_ / kPingsPerLease;
  if (ping_ && ping_->stage != ClientOperation::Stage::kFinished) {
    // A ping may wait behind a long request, such as an accumulate. If all requests in flight are
    // quick, a missing reply means that the box hangs.
    const bool alone = table_.posted_count() == 1;
    const auto timeout = alone ? lease_ : std::max<Clock::duration>(lease_, kHungBoxTimeout);
    const bool hangs = now - pinged_ > timeout && std::ranges::all_of(posted_, is_quick);
    if (hangs) table_.break_off("the box does not answer");
    return;
  }
  ping_ = std::make_shared<ClientOperation>(protocol::Opcode::kPing);
  pinged_ = now;
  table_.add(ping_, Clock::time_point::max());
}

void ProgressEngine::post(const Operations& operations) {
  posted_.insert(posted_.end(), operations.begin(), operations.end());
  if (!operations.empty()) registered_memory_.register_with(*transport_);
  for (const OperationPointer& operation : operations) {
    if (operation->is_transfer()) {
      operation->request.grant = operation->touches[0].attachment->grant.get();
    }
    transport_->post(operation->request);
  }
}

void ProgressEngine::take_answers() {
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
  const auto lock = table_.lock();
  for (const OperationPointer& operation : answered) table_.complete(operation);
}

// Copies

bool ProgressEngine::copy_now(protocol::Opcode opcode, const Touch& touch, std::byte* local) {
  require_parent();
  auto lock = table_.lock();
  const Attachment& attachment = *touch.attachment;
  const bool can = !table_.closing() && table_.status().up() &&
                   attachment.state == AttachmentState::kLive &&
                   attachment.grant->memory != nullptr && !order::blocked(touch);
  return can && copy(lock, opcode, touch, local);
}

void ProgressEngine::copy_some() {
  auto lock = table_.lock();
  for (size_t bytes = 0; bytes < kCopiedBytesPerTurn && table_.status().up();) {
    OperationPointer operation = table_.take_copy();
    if (!operation) return;
    const Touch& touch = operation->touches[0];
    bytes += touch.end - touch.begin;
    if (!operation->settled() &&
        !copy(lock, operation->opcode(), touch, operation->request.local)) {
      return table_.put_back_copy(std::move(operation));
    }
    table_.finish(std::move(operation));
  }
}

// Releases the lock during the copy. take_transport() waits until copiers_ is 0, so the transport
// stays. The grant keeps the segment mapped.
bool ProgressEngine::copy(RequestTable::Lock& lock, protocol::Opcode opcode, const Touch& touch,
                          std::byte* local) {
  const std::shared_ptr<transport::Grant> grant = touch.attachment->grant;
  const transport::Transport& transport = *transport_;
  ++copiers_;
  lock.unlock();

  const size_t bytes = touch.end - touch.begin;
  std::byte* remote = grant->memory + touch.begin;
  bool alive = transport.alive();
  if (alive) {
    if (opcode == protocol::Opcode::kRead) {
      protocol::load_elements(local, remote, bytes, stores_of(bytes));
    } else {
      protocol::store_elements(remote, local, bytes, stores_of(bytes));
    }
    alive = transport.alive();
  }

  lock.lock();
  if (--copiers_ == 0) no_copiers_.notify_all();
  if (!alive) table_.break_off("the box is gone");
  return alive;
}

// The transport

std::unique_ptr<transport::Transport> ProgressEngine::take_transport() {
  auto lock = table_.lock();
  no_copiers_.wait(lock, [&] { return copiers_ == 0; });
  return std::move(transport_);
}

void ProgressEngine::drop_transport() {
  take_transport().reset();
  const auto lock = table_.lock();
  for (const OperationPointer& operation : posted_) {
    if (operation->expired) table_.fail_expired(*operation);
  }
}

void ProgressEngine::replace_transport(std::unique_ptr<transport::Transport> transport,
                                       Clock::duration lease) {
  transport_ = std::move(transport);
  registered_memory_.renew();
  lease_ = lease;
  next_ping_ = Clock::now() + lease_ / kPingsPerLease;
}

void ProgressEngine::post_again(const Operations& operations) {
  try {
    post(operations);
  } catch (const std::exception& error) {
    const auto lock = table_.lock();
    table_.break_off(error.what());
  }
}

void ProgressEngine::fail_all(BoxError::Cause cause, const std::string& why) {
  table_.fail_all(cause, why);
  posted_.clear();
}

}  // namespace hbm::box::client
