#include "box/transport/lanes.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/threads.h"
#include "base/waiting.h"
#include "box/transport/grant_request.h"

namespace hbm::transport {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr nanoseconds kLongestSleep = std::chrono::hours(1);

// Of all `polled`; returns also when a signal comes.
void sleep_on(std::span<pollfd> polled, nanoseconds most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec limit{seconds.count(), (most - seconds).count()};
  if (ppoll(polled.data(), polled.size(), &limit, nullptr) >= 0) return;
  for (pollfd& one : polled) one.revents = 0;
  if (errno == EINTR || errno == EAGAIN) return;
  throw Error(ErrorKind::kNetwork,
              std::string("cannot wait for a memory box: ") + std::strerror(errno));
}

std::shared_ptr<Grant> grant_of(const TransportRequest& work) {
  smb::Allocated allocated;
  std::memcpy(&allocated, work.reply.data(), sizeof(allocated));
  auto grant = std::make_shared<Grant>();
  grant->handle = grant_request(work).handle;
  grant->size = allocated.size;
  return grant;
}

bool grants(const TransportRequest& work) {
  return work.status == smb::Status::kOk &&
         (work.opcode == smb::Opcode::kAlloc || work.opcode == smb::Opcode::kAttach);
}

}  // namespace

Lanes::Lanes(std::vector<std::unique_ptr<smb::FrameStream>> streams, const std::string& box,
             CompleteGrant complete)
    : complete_(std::move(complete)) {
  std::vector<int> sockets;
  for (auto& stream : streams) {
    sockets.push_back(stream->fd());
    lanes_.push_back(std::make_unique<Lane>(*this, std::move(stream), box));
  }
  watch_ = std::make_unique<HangupWatch>(std::move(sockets), [this] { bell_.ring(); });
}

Lanes::~Lanes() {
  watch_.reset();
  fail("the link was closed");
  for (std::thread& thread : threads_) thread.join();
}

void Lanes::post(TransportRequest& work) {
  require_whole();
  try {
    start(work);
  } catch (const Error& error) {
    fail(error.what());
    require_whole();
  }
}

void Lanes::start(TransportRequest& work) {
  const bool idle = first().unanswered() == 0;
  ++posted_;
  if (work.opcode == smb::Opcode::kRead || work.opcode == smb::Opcode::kWrite) {
    slices_.put(work);
    const bool for_others =
        work.bytes <= kSmallBytes && first().moving_bytes() > kSmallBytes && slices_.awaited();
    if (!for_others) refill(first());
    if (slices_.left()) call_threads();
  } else {
    first().send(work);
  }
  if (idle || first().queued_bytes() >= kGatheredBytes) first().flush();
}

void Lanes::refill(Connection& lane) {
  while (lane.moving_bytes() < kLaneBytes) {
    const std::optional<Slice> slice = slices_.take();
    if (!slice) return;
    lane.send(*slice);
  }
}

void Lanes::progress(nanoseconds most) {
  require_whole();
  const Deadline deadline = steady_clock::now() + std::min(most, kLongestSleep);
  const uint64_t before = finished_.load(std::memory_order_acquire);
  try {
    first().flush();
    while (finished_.load(std::memory_order_acquire) == before && before != posted_) {
      if (!turn(deadline) || steady_clock::now() >= deadline) break;
      require_whole();
    }
  } catch (const Broken&) {
    throw;
  } catch (const Error& error) {
    fail(error.what());
    require_whole();
  }
}

bool Lanes::turn(Deadline deadline) {
  if (!more_) {
    std::array<pollfd, 2> polled = {{{first().fd(), first().events(), 0}, {bell_.fd(), POLLIN, 0}}};
    const auto look = [&] {
      sleep_on(polled, nanoseconds(0));
      return polled[0].revents != 0 || polled[1].revents != 0;
    };
    if (steady_clock::now() >= deadline) {
      look();
    } else if (!spin(look)) {
      sleep_on(polled, std::max(deadline - steady_clock::now(), nanoseconds(0)));
    }
    more_ = (polled[0].revents & ~POLLOUT) != 0;
    if (polled[1].revents != 0) {
      bell_.clear();
      return false;
    }
  }
  if (more_) more_ = first().receive();
  refill(first());
  first().flush();
  return true;
}

void Lanes::serve(Connection& lane) {
  for (;;) {
    if (lane.unanswered() == 0) {
      const std::optional<Slice> slice = slices_.wait();
      if (!slice) return;
      lane.send(*slice);
    }
    refill(lane);
    lane.flush();
    pollfd polled{lane.fd(), lane.events(), 0};
    sleep_on({&polled, 1}, kLongestSleep);
    bool more = (polled.revents & ~POLLOUT) != 0;
    while (more && lane.unanswered() > 0) {
      more = lane.receive();
      refill(lane);
      lane.flush();
    }
  }
}

void Lanes::call_threads() {
  const SignalsHeldOff held_off;
  for (size_t lane = threads_.size() + 1; lane < lanes_.size(); ++lane) {
    const auto run = [this, lane] {
      try {
        serve(lanes_[lane]->connection);
      } catch (const std::exception& error) {
        fail(error.what());
      }
    };
    try {
      threads_.emplace_back(run);
    } catch (const std::system_error& error) {
      log::warn("a link to a memory box goes on with " + std::to_string(lane) + " of " +
                std::to_string(lanes_.size()) + " connections: cannot start a thread: " +
                error.what() + "; raise the limit of processes (ulimit -u)");
      break;
    }
  }
  slices_.call();
}

void Lanes::Lane::answered(TransportRequest& work, Descriptor descriptor) {
  if (grants(work)) {
    try {
      const std::shared_ptr<Grant> grant = grant_of(work);
      if (all_.complete_) all_.complete_(*grant, work, std::move(descriptor));
      work.granted = grant;
    } catch (const Error& error) {
      work.status =
          error.kind() == ErrorKind::kExhausted ? smb::Status::kExhausted : smb::Status::kInternal;
      work.cause = error.what();
    }
  }
  work.done.store(true, std::memory_order_release);
  all_.finished(*this);
}

void Lanes::Lane::answered(const Slice& slice, smb::Status status, const std::string& cause) {
  if (all_.slices_.finish(slice, status, cause)) all_.finished(*this);
}

void Lanes::finished(const Lane& by) noexcept {
  finished_.fetch_add(1, std::memory_order_release);
  if (&by != lanes_.front().get()) bell_.ring();
}

bool Lanes::alive() const noexcept {
  return !broken_.load(std::memory_order_acquire) && !watch_->hung_up();
}

void Lanes::require_whole() const {
  if (!broken_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  throw Broken(cause_);
}

void Lanes::fail(const std::string& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (broken_.load(std::memory_order_relaxed)) return;
    cause_ = cause;
    broken_.store(true, std::memory_order_release);
  }
  for (const auto& lane : lanes_) shutdown(lane->connection.fd(), SHUT_RDWR);
  slices_.stop();
  bell_.ring();
}

}  // namespace hbm::transport
