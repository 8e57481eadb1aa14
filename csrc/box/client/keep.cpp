// The keeper: drives what nobody waits for, pings, and reconnects.
#include <poll.h>

#include <algorithm>
#include <exception>
#include <random>
#include <thread>

#include "base/log.h"
#include "box/client/core.h"

namespace hbm::client {
namespace {

constexpr auto kFirstDelay = std::chrono::milliseconds(10);
constexpr auto kLongestDelay = std::chrono::milliseconds(1000);
constexpr auto kShortestTimeout = std::chrono::milliseconds(100);
constexpr auto kLook = std::chrono::milliseconds(10);  // for a driver to have left

// Between half of it and all of it, so that a box's clients do not come back all at once.
Clock::duration jittered(Clock::duration delay) {
  thread_local std::minstd_rand random{std::random_device{}()};
  return delay / 2 + delay / 2 * std::uniform_int_distribution<>(0, 1000)(random) / 1000;
}

Clock::duration longer(Clock::duration delay) {
  return std::min<Clock::duration>(delay * 2, kLongestDelay);
}

}  // namespace

void Core::keep() {
  for (bool on = true; on;) {
    try {
      on = keep_on();
    } catch (const std::exception& error) {
      {
        const Lock lock(mutex_);
        break_off(error.what());
      }
      std::this_thread::sleep_for(kFirstDelay);
    }
  }
}

bool Core::keep_on() {
  ConnectionState state;
  bool work = false;
  auto until = Clock::time_point::max();
  {
    const Lock lock(mutex_);
    if (stopping_) return false;
    state = state_;
    work = has_work();
    if (state == ConnectionState::kUp) until = std::min(next_ping_, earliest_);
  }
  if (state == ConnectionState::kBroken) {
    reconnect();
    return true;
  }
  const auto now = Clock::now();
  if (work || now >= until) {
    if (Lock drive(drive_, std::try_to_lock); drive) {
      step(Clock::time_point::max(), true);
      return true;
    }
    until = now + kLook;
  }
  sleep(until);
  return true;
}

void Core::sleep(Clock::time_point until) {
  // The keeper alone changes transport_.
  const int liveness = transport_ ? transport_->liveness_fd() : -1;
  auto longest = std::chrono::milliseconds(transport_ && liveness < 0 ? 100 : 3'600'000);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(
      std::max(until - Clock::now(), Clock::duration::zero()));
  pollfd watched[] = {{.fd = wake_event_.fd(), .events = POLLIN, .revents = 0},
                      {.fd = liveness, .events = POLLRDHUP, .revents = 0}};
  poll(watched, 2, static_cast<int>(std::min(left, longest).count()));
  wake_event_.clear();
  const bool closed = watched[1].revents != 0;
  if (closed || (transport_ && !transport_->alive())) {
    const Lock lock(mutex_);
    break_off(closed ? "the box closed the connection" : "the box is gone");
  }
}

void Core::reconnect() {
  const Lock drive(drive_);
  drop_transport();
  Clock::duration delay = kFirstDelay;
  unsigned fruitless;
  {
    const Lock lock(mutex_);
    fruitless = fruitless_;
  }
  for (unsigned i = 0; i < fruitless && delay < kLongestDelay; ++i) delay = longer(delay);
  if (fruitless > 0 && !pause(jittered(delay))) return;
  for (;;) {
    Clock::duration left;
    {
      const Lock lock(mutex_);
      if (stopping_) return;
      expire(Clock::now());
      left = broken_at_ + options_.reconnect_timeout - Clock::now();
      if (left <= Clock::duration::zero()) {
        state_ = ConnectionState::kGivenUp;
        log::write(warned_ ? log::Level::kError : log::Level::kInfo, "gave up: " + outage());
        return fail_unfinished(BoxError::Cause::kUnreachable, outage());
      }
    }
    const auto timeout =
        std::min(std::max(std::chrono::ceil<std::chrono::milliseconds>(left), kShortestTimeout),
                 options_.connect_timeout);
    if (try_again(timeout)) return;
    sleep(Clock::now() + jittered(delay));
    delay = longer(delay);
  }
}

bool Core::pause(Clock::duration delay) {
  const auto until = Clock::now() + delay;
  while (Clock::now() < until) {
    sleep(until);
    const Lock lock(mutex_);
    if (stopping_) return false;
    expire(Clock::now());
  }
  return true;
}

std::unique_ptr<transport::Transport> Core::take_transport() {
  Lock lock(mutex_);
  no_copiers_.wait(lock, [&] { return copiers_ == 0; });
  return std::move(transport_);
}

void Core::drop_transport() {
  take_transport().reset();
  const Lock lock(mutex_);
  for (const OperationPointer& operation : posted_) {
    if (operation->expired) fail(*operation, late(*operation));
  }
}

}  // namespace hbm::client
