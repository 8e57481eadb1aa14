#include "box/client/core.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/log.h"
#include "base/threads.h"
#include "box/client/dialer.h"
#include "box/client/operation.h"

namespace hbm::client {
namespace {

constexpr auto kInterruptPeriod = std::chrono::milliseconds(100);

constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365 * 100);

// Limits a time to kForever, so that now plus it is still a point in time.
std::chrono::milliseconds bounded(const char* name, std::chrono::milliseconds time) {
  if (time.count() >= 0) return std::min(time, kForever);
  throw Error(ErrorKind::kInvalid,
              std::string(name) + " is not negative: " + std::to_string(time.count()) + " ms");
}

ClientOptions bounded(ClientOptions options) {
  options.connect_timeout = bounded("connect_timeout", options.connect_timeout);
  options.reconnect_timeout = bounded("reconnect_timeout", options.reconnect_timeout);
  options.timeout = bounded("timeout", options.timeout);
  return options;
}

std::string time_text(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm local{};
  localtime_r(&seconds, &local);
  char text[32];
  std::strftime(text, sizeof text, "%F %T", &local);
  return text;
}

// Whether somebody waits for the box: not for a ping, nor to give back what is gone with the box.
bool needs_box(const ClientOperation& operation) {
  return operation.opcode() != smb::Opcode::kPing && operation.opcode() != smb::Opcode::kFree;
}

}  // namespace

Core::Core(const ClientOptions& options) : options_(bounded(options)), dialer_(options_) {
  transport::OpenedTransport opened = dialer_.dial();
  transport_ = std::move(opened.transport);
  session_ = opened.joined.session;
  contents_ = opened.joined.box;
  lease_ = std::chrono::milliseconds(opened.joined.lease_ms);
  next_ping_ = Clock::now() + lease_ / 3;
  const SignalsHeldOff held_off;
  keeper_ = std::thread([this] { keep(); });
}

Core::~Core() = default;

void Core::require_parent() const {
  if (!fork_.in_child()) return;
  throw Error(ErrorKind::kUnavailable,
              "a forked child cannot use its parent's connection to the box at " + dialer_.box() +
                  ": connect again in the child");
}

void Core::issue(std::span<const OperationPointer> operations, bool waits) {
  require_parent();
  {
    const Lock lock(mutex_);
    for (const OperationPointer& operation : operations) check(*operation);
    const auto deadline =
        options_.timeout.count() > 0 ? Clock::now() + options_.timeout : Clock::time_point::max();
    for (const OperationPointer& operation : operations) {
      operation->issued.store(true, std::memory_order_release);
      add(operation, deadline);
    }
  }
  if (waits) return;
  if (Lock drive(drive_, std::try_to_lock); drive) {
    step(Clock::now(), false);
  } else {
    wake_driver();
  }
  leave_to_keeper();
}

void Core::check(const ClientOperation& operation) const {
  if (closing_) {
    throw BoxError(BoxError::Cause::kClosed,
                   operation.text() + ": the client of " + dialer_.box() + " was closed");
  }
  if (operation.opcode() == smb::Opcode::kFree) return;
  for (const Touch& touch : operation.touches) {
    if (touch.attachment && touch.attachment->state == AttachmentState::kFreed) {
      throw Error(ErrorKind::kInvalid,
                  operation.text() + ": segment " + key_text(touch.attachment->key) + " was freed");
    }
  }
}

void Core::add(const OperationPointer& operation, Clock::time_point deadline) {
  if (operation->opcode() == smb::Opcode::kFree) {
    Attachment& attachment = *operation->touches[0].attachment;
    if (attachment.state != AttachmentState::kLive) return operation->settle();
    attachment.state = AttachmentState::kFreed;
  }
  if (std::optional<Failure> failure = reason_to_fail(*operation))
    return fail(*operation, *failure);
  if (operation->is_empty()) return operation->settle();
  if (state_ == ConnectionState::kBroken && needs_box(*operation)) warn_of_loss();
  operation->deadline = deadline;
  earliest_ = std::min(earliest_, deadline);
  operation->place = unfinished_.insert(unfinished_.end(), operation);
  order::add(*operation);
  if (operation->stage == ClientOperation::Stage::kReady) enqueue({operation.get()});
}

std::optional<Failure> Core::reason_to_fail(const ClientOperation& operation) const {
  if (state_ == ConnectionState::kGivenUp) {
    return failure(BoxError::Cause::kUnreachable, operation.text() + ": " + outage());
  }
  for (const Touch& touch : operation.touches) {
    if (touch.attachment && touch.attachment->state == AttachmentState::kLost) {
      return failure(BoxError::Cause::kLost, operation.text() + ": " + touch.attachment->why);
    }
  }
  return std::nullopt;
}

void Core::enqueue(const std::vector<ClientOperation*>& ready) {
  for (ClientOperation* operation : ready) {
    const auto& attachment = operation->touches[0].attachment;
    const bool mapped = operation->is_transfer() && attachment->grant->memory != nullptr;
    auto& queue = mapped ? copies_ : operation->is_sequenced() ? sequenced_ : ready_;
    queue.push_back(*operation->place);
  }
}

Failure Core::late(const ClientOperation& operation) const {
  const char* doubt = operation.number > 0 ? "; it may or may not have been carried out" : "";
  return failure(BoxError::Cause::kTimeout, operation.text() + ": not done within " +
                                                std::to_string(options_.timeout.count()) +
                                                " ms by the box at " + dialer_.box() + doubt);
}

void Core::fail(ClientOperation& operation, Failure failure) {
  if (operation.settled()) return;
  operation.failure = std::move(failure);
  operation.settle();
}

void Core::finish(OperationPointer operation) {
  enqueue(order::finished(*operation));
  operation->hold.reset();
  unfinished_.erase(operation->place);
  if (!operation->settled()) operation->settle();
  if (closing_) nothing_left_.notify_all();
}

void Core::fail_unfinished(BoxError::Cause cause, const std::string& why) {
  for (const OperationPointer& operation : unfinished_) {
    const char* doubt = operation->number > 0 ? "; it may or may not have been carried out" : "";
    fail(*operation, failure(cause, operation->text() + ": " + why + doubt));
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
  posted_.clear();
  outstanding_.clear();
  in_flight_ = 0;
}

void Core::break_off(const std::string& why) {
  if (state_ != ConnectionState::kUp) return;
  state_ = ConnectionState::kBroken;
  why_ = why;
  last_attempt_.clear();
  // A box that is closed before its clients is no cause for alarm, unless one of them wants it.
  const bool wanted = std::any_of(unfinished_.begin(), unfinished_.end(),
                                  [](const auto& operation) { return needs_box(*operation); });
  if (std::exchange(answered_, false) || !wanted) {
    since_ = std::chrono::system_clock::now();
    broken_at_ = Clock::now();
    warned_ = false;
    fruitless_ = 0;
  } else {
    ++fruitless_;
  }
  if (wanted) {
    warn_of_loss();
  } else {
    log::info(loss());
  }
  nothing_left_.notify_all();
  wake_event_.signal();
}

std::string Core::loss() const {
  return "lost the connection to the box at " + dialer_.box() + ": " + why_ + "; connecting again";
}

void Core::warn_of_loss() {
  if (std::exchange(warned_, true)) return;
  log::warn(loss());
}

std::string Core::outage() const {
  const auto lasts =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now() - since_);
  std::string text = "the box at " + dialer_.box() + " is unreachable since " + time_text(since_) +
                     " (" + std::to_string(lasts.count()) + " s): " + why_;
  if (fruitless_ > 0) {
    text += "; " + std::to_string(fruitless_) +
            " connections since then broke before anything was answered over them";
  }
  if (!last_attempt_.empty()) text += "; the last attempt to connect again: " + last_attempt_;
  return text;
}

bool Core::wait(ClientOperation& operation, Clock::time_point until) {
  require_parent();
  if (!operation.settled() && !operation.issued.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kInvalid,
                operation.text() + ": it was not issued yet; wait for it after its batch");
  }
  bool told = false;
  while (!operation.settled()) {
    const auto now = Clock::now();
    if (now >= until) return false;
    const auto pause = options_.while_waiting ? std::min(until, now + kInterruptPeriod) : until;
    if (Lock drive(drive_, std::try_to_lock); drive) {
      const auto goes_on = [&] {
        const Lock lock(mutex_);
        return has_work();
      };
      while (!operation.settled() && Clock::now() < pause && goes_on()) step(pause, true);
    } else if (!std::exchange(told, true)) {
      wake_driver();
    }
    leave_to_keeper();
    operation.wait_settled(pause);
    if (!operation.settled() && options_.while_waiting) options_.while_waiting();
  }
  return true;
}

bool Core::has_work() const {
  return state_ == ConnectionState::kUp && !stopping_ &&
         (in_flight_ > 0 || !outstanding_.empty() || !ready_.empty() || !sequenced_.empty() ||
          !copies_.empty());
}

void Core::wake_driver() {
  const Lock lock(mutex_);
  if (transport_) transport_->wake();
}

void Core::leave_to_keeper() {
  const Lock lock(mutex_);
  if (has_work()) wake_event_.signal();
}

bool Core::copy_now(smb::Opcode opcode, const Touch& touch, std::byte* local) {
  require_parent();
  Lock lock(mutex_);
  const Attachment& attachment = *touch.attachment;
  const bool can = !closing_ && state_ == ConnectionState::kUp &&
                   attachment.state == AttachmentState::kLive &&
                   attachment.grant->memory != nullptr && !order::blocked(touch);
  return can && copy(lock, opcode, touch, local);
}

std::shared_ptr<std::byte> Core::memory(const Attachment& attachment) {
  require_parent();
  const Lock lock(mutex_);
  const std::string asked = "view of segment " + key_text(attachment.key);
  if (closing_) throw BoxError(BoxError::Cause::kClosed, asked + ": the client was closed");
  if (attachment.state == AttachmentState::kFreed) {
    throw Error(ErrorKind::kInvalid, asked + ": it was freed");
  }
  if (attachment.state == AttachmentState::kLost) {
    throw BoxError(BoxError::Cause::kLost, asked + ": " + attachment.why);
  }
  if (attachment.grant->memory == nullptr) {
    throw Error(ErrorKind::kUnsupported,
                asked + ": only the transport shm has the segment's memory in this process, and " +
                    "this is " + transport_name(dialer_.transport()) + "; read() copies it");
  }
  return {attachment.grant, attachment.grant->memory};
}

std::exception_ptr Core::wait_for_nothing_left(Lock& lock, Clock::time_point until) {
  const auto nothing_left = [&] { return unfinished_.empty() || state_ != ConnectionState::kUp; };
  for (auto now = Clock::now(); now < until; now = Clock::now()) {
    if (nothing_left_.wait_until(lock, std::min(until, now + kInterruptPeriod), nothing_left))
      break;
    if (!options_.while_waiting) continue;
    lock.unlock();
    std::exception_ptr interrupt;
    try {
      options_.while_waiting();
    } catch (...) {
      interrupt = std::current_exception();
    }
    lock.lock();
    if (interrupt) return interrupt;
  }
  return nullptr;
}

void Core::close(std::chrono::milliseconds patience) {
  require_parent();
  const auto until = Clock::now() + bounded("patience", patience);
  const std::scoped_lock one(closer_);
  std::exception_ptr interrupt;
  {
    Lock lock(mutex_);
    if (closing_) return;
    closing_ = true;
    interrupt = wait_for_nothing_left(lock, until);
    stopping_ = true;
    if (transport_) transport_->wake();  // the driver, who may be the keeper
  }
  wake_event_.signal();
  keeper_.join();

  bool up = false;
  {
    const Lock lock(mutex_);
    up = std::exchange(state_, ConnectionState::kGivenUp) == ConnectionState::kUp;
    if (transport_) transport_->wake();
  }
  const Lock drive(drive_);
  std::unique_ptr<transport::Transport> last = take_transport();
  if (up) leave(std::move(last), dialer_.box());
  last.reset();
  {
    const Lock lock(mutex_);
    fail_unfinished(BoxError::Cause::kClosed, "the client was closed");
  }
  if (interrupt) std::rethrow_exception(interrupt);
}

bool Core::closed() const {
  const Lock lock(mutex_);
  return closing_;
}

}  // namespace hbm::client
