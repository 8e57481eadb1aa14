#include "box/transport/stream_transport.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/threads.h"
#include "base/waiting.h"
#include "box/protocol/wake_event.h"
#include "box/transport/tuning.h"

namespace hbm::transport {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

// Sleeps until one of `polled` is ready or `most` has passed; returns also when a signal comes.
void sleep_on(std::span<pollfd> polled, nanoseconds most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec limit{seconds.count(), (most - seconds).count()};
  if (ppoll(polled.data(), polled.size(), &limit, nullptr) >= 0) return;
  for (pollfd& one : polled) one.revents = 0;
  if (errno == EINTR || errno == EAGAIN) return;
  throw Error(ErrorKind::kNetwork,
              std::string("cannot wait for a memory box: ") + std::strerror(errno));
}

std::shared_ptr<Grant> grant_of(const TransportRequest& request) {
  const auto allocated = smb::read_as<smb::Allocated>(request.reply);
  auto grant = std::make_shared<Grant>();
  grant->handle = grant_request(request).handle;
  grant->size = allocated.size;
  return grant;
}

bool grants(const TransportRequest& request) {
  return request.status == smb::Status::kOk &&
         (request.opcode == smb::Opcode::kAlloc || request.opcode == smb::Opcode::kAttach);
}

}  // namespace

// A thread that sleeps until the other end of a connection closes it, for clients that do not touch
// their sockets while they copy.
//
// Threads: hung_up() may be called from any thread and costs one load. The sockets must outlive the
// watch.
class HangupWatch {
 public:
  // `then` is called once, by the watch's thread, after the first of `sockets` has hung up.
  HangupWatch(std::vector<int> sockets, std::function<void()> then);
  ~HangupWatch();
  HangupWatch(const HangupWatch&) = delete;
  HangupWatch& operator=(const HangupWatch&) = delete;

  bool hung_up() const noexcept { return hung_up_.load(std::memory_order_acquire); }

 private:
  void watch(const std::vector<int>& sockets);

  std::atomic<bool> hung_up_{false};
  const std::function<void()> then_;
  smb::WakeEvent stop_;
  std::thread thread_;
};

HangupWatch::HangupWatch(std::vector<int> sockets, std::function<void()> then)
    : then_(std::move(then)) {
  const SignalsHeldOff held_off;
  thread_ = std::thread([this, sockets = std::move(sockets)] { watch(sockets); });
}

HangupWatch::~HangupWatch() {
  stop_.signal();
  thread_.join();
}

void HangupWatch::watch(const std::vector<int>& sockets) {
  std::vector<pollfd> watched = {{stop_.fd(), POLLIN, 0}};
  for (int socket : sockets) watched.push_back({socket, POLLRDHUP, 0});
  while (poll(watched.data(), watched.size(), -1) < 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    break;  // the kernel cannot watch: nobody may trust the connection
  }
  if (watched.front().revents != 0) return;
  hung_up_.store(true, std::memory_order_release);
  then_();
}

StreamTransport::StreamTransport(smb::TransportKind kind,
                                 std::vector<std::unique_ptr<smb::FrameStream>> streams,
                                 const std::string& box, CompleteGrant complete)
    : kind_(kind), complete_(std::move(complete)) {
  std::vector<int> sockets;
  for (auto& stream : streams) {
    sockets.push_back(stream->fd());
    lanes_.push_back(std::make_unique<Lane>(*this, std::move(stream), box));
  }
  watch_ = std::make_unique<HangupWatch>(std::move(sockets), [this] { wake_event_.signal(); });
}

StreamTransport::~StreamTransport() {
  watch_.reset();
  fail("the transport was closed");
  for (std::thread& thread : threads_) thread.join();
}

void StreamTransport::post(TransportRequest& request) {
  require_whole();
  try {
    start(request);
  } catch (const Error& error) {
    fail(error.what());
    require_whole();
  }
}

void StreamTransport::start(TransportRequest& request) {
  const bool idle = first().unanswered() == 0;
  ++posted_;
  if (request.opcode == smb::Opcode::kRead || request.opcode == smb::Opcode::kWrite) {
    slices_.put(request);
    const bool for_others = request.bytes <= kOvertakingBytes &&
                            first().moving_bytes() > kOvertakingBytes && slices_.awaited();
    if (!for_others) refill(first());
    if (slices_.left()) call_threads();
  } else {
    first().send(request);
  }
  if (idle || first().queued_bytes() >= kGatheredBytes) first().flush();
}

void StreamTransport::refill(Connection& lane) {
  while (lane.moving_bytes() < kStreamBytesInFlight) {
    const std::optional<Slice> slice = slices_.take();
    if (!slice) return;
    lane.send(*slice);
  }
}

void StreamTransport::progress(nanoseconds most) {
  require_whole();
  const Deadline deadline = steady_clock::now() + std::min<nanoseconds>(most, kLongestStreamSleep);
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

bool StreamTransport::turn(Deadline deadline) {
  if (!more_) {
    std::array<pollfd, 2> polled = {
        {{first().fd(), first().events(), 0}, {wake_event_.fd(), POLLIN, 0}}};
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
      wake_event_.clear();
      return false;
    }
  }
  if (more_) more_ = first().receive();
  refill(first());
  first().flush();
  return true;
}

void StreamTransport::serve(Connection& lane) {
  for (;;) {
    if (lane.unanswered() == 0) {
      const std::optional<Slice> slice = slices_.wait();
      if (!slice) return;
      lane.send(*slice);
    }
    refill(lane);
    lane.flush();
    pollfd polled{lane.fd(), lane.events(), 0};
    sleep_on({&polled, 1}, kLongestStreamSleep);
    bool more = (polled.revents & ~POLLOUT) != 0;
    while (more && lane.unanswered() > 0) {
      more = lane.receive();
      refill(lane);
      lane.flush();
    }
  }
}

void StreamTransport::call_threads() {
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
      log::warn("a tcp transport to a memory box goes on with " + std::to_string(lane) + " of " +
                std::to_string(lanes_.size()) + " connections: cannot start a thread: " +
                error.what() + "; raise the limit of processes (ulimit -u)");
      break;
    }
  }
  slices_.call();
}

void StreamTransport::Lane::answered(TransportRequest& request, Descriptor descriptor) {
  if (grants(request)) {
    try {
      const std::shared_ptr<Grant> grant = grant_of(request);
      if (all_.complete_) all_.complete_(*grant, request, std::move(descriptor));
      request.granted = grant;
    } catch (const Error& error) {
      request.status =
          error.kind() == ErrorKind::kExhausted ? smb::Status::kExhausted : smb::Status::kInternal;
      request.cause = error.what();
    }
  }
  request.done.store(true, std::memory_order_release);
  all_.finished(*this);
}

void StreamTransport::Lane::answered(const Slice& slice, smb::Status status,
                                     const std::string& cause) {
  if (all_.slices_.finish(slice, status, cause)) all_.finished(*this);
}

void StreamTransport::finished(const Lane& by) noexcept {
  finished_.fetch_add(1, std::memory_order_release);
  if (&by != lanes_.front().get()) wake_event_.signal();
}

bool StreamTransport::alive() const noexcept {
  return !broken_.load(std::memory_order_acquire) && !watch_->hung_up();
}

void StreamTransport::require_whole() const {
  if (!broken_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  throw Broken(cause_);
}

void StreamTransport::fail(const std::string& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (broken_.load(std::memory_order_relaxed)) return;
    cause_ = cause;
    broken_.store(true, std::memory_order_release);
  }
  for (const auto& lane : lanes_) shutdown(lane->connection.fd(), SHUT_RDWR);
  slices_.stop();
  wake_event_.signal();
}

}  // namespace hbm::transport
