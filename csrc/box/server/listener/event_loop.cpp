#include "box/server/listener/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/threads.h"
#include "base/waiting.h"
#include "box/server/tuning.h"

namespace hbm::box::server::listener {
namespace {

[[noreturn]] void failed(const char* what) {
  throw Error(ErrorKind::kUnavailable, std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

EventLoop::EventLoop(std::string name, std::function<int()> between_turns)
    : name_(std::move(name)),
      between_turns_(std::move(between_turns)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !bell_) failed("cannot wait for clients");
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &event) != 0) {
    failed("cannot wait for clients");
  }
}

EventLoop::~EventLoop() {
  stop();
  for (const auto& served : all()) remove(*served);
}

void EventLoop::start() {
  const SignalsHeldOff held_off;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());
}

void EventLoop::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
}

void EventLoop::add(int descriptor, uint32_t events, std::shared_ptr<Served> served) {
  Served* const key = served.get();
  epoll_event event{};
  event.events = events;
  event.data.ptr = key;
  const std::lock_guard lock(mutex_);
  watched_[key] = {descriptor, std::move(served)};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) == 0) return;
  const int failure = errno;
  watched_.erase(key);
  errno = failure;
  failed("cannot wait for a client");
}

void EventLoop::change(int descriptor, uint32_t events, Served& served) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &served;
  // Fails only after the loop has removed the descriptor, when it no longer matters.
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, descriptor, &event);
}

void EventLoop::again(const Served& served) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = watched_.find(&served);
    if (found == watched_.end()) return;
    asked_.push_back(found->second.served);
  }
  wake();
}

std::vector<std::shared_ptr<EventLoop::Served>> EventLoop::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Served>> all;
  all.reserve(watched_.size());
  for (const auto& [key, watched] : watched_) all.push_back(watched.served);
  return all;
}

void EventLoop::run() {
  std::array<epoll_event, kEventsPerTurn> events;
  bool busy = false;
  for (;;) {
    int most = between_turns_ ? between_turns_() : -1;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      for (const auto& served : asked_) {
        if (watched_.contains(served.get())) give_turn(served);
      }
      asked_.clear();
    }
    if (!turn_.empty()) most = 0;
    int ready = 0;
    const auto wait = [&](int milliseconds) {
      ready = epoll_wait(epoll_.get(), events.data(), events.size(), milliseconds);
      return ready != 0;
    };
    // After a turn with events, poll before sleeping, because a client that has just sent a frame
    // is likely to send more.
    if (!busy || !spin([&] { return wait(0); })) wait(most);
    busy = ready > 0;

    Turn turn;
    turn.swap(turn_);
    for (int i = 0; i < ready; ++i) {
      auto* const served = static_cast<Served*>(events[i].data.ptr);
      if (served == nullptr) {
        uint64_t signals = 0;
        [[maybe_unused]] const ssize_t got = read(bell_.get(), &signals, sizeof(signals));
      } else if (!served->has_turn_) {
        serve(*served, events[i].events);
      }
    }
    for (const auto& served : turn) {
      served->has_turn_ = false;
      serve(*served, 0);
    }
  }
}

void EventLoop::serve(Served& served, uint32_t events) {
  switch (served.serve(events)) {
    case Next::kWait:
      return;
    case Next::kGone:
      return remove(served);
    case Next::kAgain:
      break;
  }
  const std::lock_guard lock(mutex_);
  give_turn(watched_.at(&served).served);
}

void EventLoop::give_turn(const std::shared_ptr<Served>& served) {
  if (!std::exchange(served->has_turn_, true)) turn_.push_back(served);
}

void EventLoop::remove(Served& served) {
  std::shared_ptr<Served> last;
  {
    const std::lock_guard lock(mutex_);
    const auto found = watched_.find(&served);
    if (found == watched_.end()) return;
    // Remove the descriptor before it is closed. If a child process holds a copy, closing does not
    // remove it from epoll. After the close, the number may belong to another file.
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.descriptor, nullptr);
    last = std::move(found->second.served);
    watched_.erase(found);
  }
  last->gone();
}

void EventLoop::wake() noexcept {
  constexpr uint64_t kOne = 1;
  [[maybe_unused]] const ssize_t put = write(bell_.get(), &kOne, sizeof(kOne));
}

}  // namespace hbm::box::server::listener
