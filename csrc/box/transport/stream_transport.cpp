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

namespace hbm::box::transport {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

// Sleeps until one of `polled` is ready, `most` has passed, or a signal arrives.
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
  const auto allocated = protocol::read_as<protocol::Allocated>(request.reply);
  auto grant = std::make_shared<Grant>();
  grant->handle = grant_request(request).handle;
  grant->size = allocated.size;
  return grant;
}

bool grants(const TransportRequest& request) {
  return request.status == protocol::Status::kOk && (request.opcode == protocol::Opcode::kAlloc ||
                                                     request.opcode == protocol::Opcode::kAttach);
}

}  // namespace

// A thread that detects when the peer closes a connection, for clients that do not use their
// sockets while they copy.
//
// Threads: hung_up() may be called from any thread, and costs one load. The sockets must outlive
// this object.
class HangupWatch {
 public:
  // Calls `then` once, on the watching thread, after the first of `sockets` has hung up.
  HangupWatch(std::vector<int> sockets, std::function<void()> then);
  ~HangupWatch();
  HangupWatch(const HangupWatch&) = delete;
  HangupWatch& operator=(const HangupWatch&) = delete;

  bool hung_up() const noexcept { return hung_up_.load(std::memory_order_acquire); }

 private:
  void watch(const std::vector<int>& sockets);

  std::atomic<bool> hung_up_{false};
  const std::function<void()> then_;
  protocol::WakeEvent stop_;
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
    break;  // poll() failed: report the connections as lost
  }
  if (watched.front().revents != 0) return;
  hung_up_.store(true, std::memory_order_release);
  then_();
}

StreamTransport::StreamTransport(protocol::TransportKind kind,
                                 std::vector<std::unique_ptr<protocol::FrameStream>> streams,
                                 const std::string& box, CompleteGrant complete)
    : kind_(kind), complete_(std::move(complete)) {
  std::vector<int> sockets;
  for (auto& stream : streams) {
    sockets.push_back(stream->fd());
    connections_.push_back(std::make_unique<PooledConnection>(*this, std::move(stream), box));
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
  if (request.opcode == protocol::Opcode::kRead || request.opcode == protocol::Opcode::kWrite) {
    slices_.put(request);
    const bool for_others = request.bytes <= kOvertakingBytes &&
                            first().moving_bytes() > kOvertakingBytes && slices_.awaited();
    if (!for_others) refill(first());
    if (slices_.left()) wake_threads();
  } else {
    first().send(request);
  }
  if (idle || first().queued_bytes() >= kGatheredBytes) first().flush();
}

void StreamTransport::refill(Connection& connection) {
  const uint64_t share = kMostStreamBytesInFlight / connections_.size();
  const uint64_t most = kStreamBytesInFlight + std::min(connection.link_bytes(), share);
  while (connection.moving_bytes() < most) {
    const std::optional<Slice> slice = slices_.take();
    if (!slice) return;
    connection.send(*slice);
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
    const auto poll_once = [&] {
      sleep_on(polled, nanoseconds(0));
      return polled[0].revents != 0 || polled[1].revents != 0;
    };
    if (steady_clock::now() >= deadline) {
      poll_once();
    } else if (!spin(poll_once)) {
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

void StreamTransport::serve(Connection& connection) {
  for (;;) {
    if (connection.unanswered() == 0) {
      const std::optional<Slice> slice = slices_.wait();
      if (!slice) return;
      connection.send(*slice);
    }
    refill(connection);
    connection.flush();
    pollfd polled{connection.fd(), connection.events(), 0};
    sleep_on({&polled, 1}, kLongestStreamSleep);
    bool more = (polled.revents & ~POLLOUT) != 0;
    while (more && connection.unanswered() > 0) {
      more = connection.receive();
      refill(connection);
      connection.flush();
    }
  }
}

void StreamTransport::wake_threads() {
  const SignalsHeldOff held_off;
  for (size_t index = threads_.size() + 1; index < connections_.size(); ++index) {
    const auto run = [this, index] {
      try {
        serve(connections_[index]->connection);
      } catch (const std::exception& error) {
        fail(error.what());
      }
    };
    try {
      threads_.emplace_back(run);
    } catch (const std::system_error& error) {
      log::warn("a tcp transport to a memory box continues with " + std::to_string(index) + " of " +
                std::to_string(connections_.size()) + " connections: cannot start a thread: " +
                error.what() + "; raise the limit of processes (ulimit -u)");
      break;
    }
  }
  slices_.notify();
}

void StreamTransport::PooledConnection::answered(TransportRequest& request, Descriptor descriptor) {
  if (grants(request)) {
    try {
      const std::shared_ptr<Grant> grant = grant_of(request);
      if (all_.complete_) all_.complete_(*grant, request, std::move(descriptor));
      request.granted = grant;
    } catch (const Error& error) {
      request.status = error.kind() == ErrorKind::kExhausted ? protocol::Status::kExhausted
                                                             : protocol::Status::kInternal;
      request.cause = error.what();
    }
  }
  request.done.store(true, std::memory_order_release);
  all_.finished(*this);
}

void StreamTransport::PooledConnection::answered(const Slice& slice, protocol::Status status,
                                                 const std::string& cause) {
  if (all_.slices_.finish(slice, status, cause)) all_.finished(*this);
}

void StreamTransport::finished(const PooledConnection& by) noexcept {
  finished_.fetch_add(1, std::memory_order_release);
  if (&by != connections_.front().get()) wake_event_.signal();
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
  for (const auto& pooled : connections_) shutdown(pooled->connection.fd(), SHUT_RDWR);
  slices_.stop();
  wake_event_.signal();
}

}  // namespace hbm::box::transport
