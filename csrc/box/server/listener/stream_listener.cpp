#include "box/server/listener/stream_listener.h"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/server/listener/stream_acceptor.h"
#include "box/server/listener/stream_connection.h"
#include "box/server/tuning.h"

namespace hbm::box::server::listener {
namespace {

using Clock = std::chrono::steady_clock;

void raise_open_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
    log::warn("cannot raise the limit on open files: clients are limited too (ulimit -n)");
  }
}

ListenerIdentity identity_of(const StreamListenerOptions& options) {
  ListenerIdentity identity{options.token, options.boot_id, options.socket_path, options.verbs_port,
                            options.seal};
  require_sendable(identity);
  return identity;
}

void require_valid(const StreamListenerOptions& options) {
  if (options.listen.empty() && options.socket_path.empty()) {
    throw Error(ErrorKind::kInvalid, "a box needs an address or a Unix socket to listen on");
  }
  if (options.threads == 0 || options.most_joining == 0 || options.quantum == 0) {
    throw Error(ErrorKind::kInvalid,
                "a box's listener needs at least one thread, one joining client and a quantum");
  }
}

int sooner(int left, int right) {
  if (left < 0 || right < 0) return std::max(left, right);
  return std::min(left, right);
}

}  // namespace

struct StreamListener::Impl {
  explicit Impl(RequestHandler& handler, const StreamListenerOptions& options)
      : context{handler,
                identity_of(options),
                options.quantum,
                {options.most_joining, options.join_within},
                {kMostRefusalWarnings, kRefusalWarningPeriod}} {
    for (uint32_t i = 0; i < options.threads; ++i) {
      std::function<int()> between_turns;
      if (i == 0) between_turns = [this] { return housekeeping(); };
      loops.push_back(
          std::make_unique<EventLoop>("hbm-listen-" + std::to_string(i), std::move(between_turns)));
    }
    std::vector<uid_t> users = options.users;
    if (users.empty()) users.push_back(geteuid());
    for (const protocol::Address& address : options.listen) listen(address, users);
    if (!options.socket_path.empty()) listen({"", 0, options.socket_path}, users);
    for (const auto& loop : loops) loop->start();
  }

  ~Impl() {
    for (const auto& loop : loops) loop->stop();
  }

  void listen(const protocol::Address& address, const std::vector<uid_t>& users) {
    acceptors.push_back(std::make_shared<StreamAcceptor>(context, loops, address, users));
    const auto& acceptor = acceptors.back();
    loops.front()->add(acceptor->fd(), EPOLLIN, acceptor);
    if (!address.is_unix()) addresses.push_back(acceptor->address());
  }

  int housekeeping() {
    int most = context.pending.sweep();
    for (const auto& acceptor : acceptors) most = sooner(most, acceptor->resume());
    return sooner(most, close_connections_of_ended_sessions());
  }

  // Returns the milliseconds until the next call.
  int close_connections_of_ended_sessions() {
    const Clock::time_point now = Clock::now();
    if (now >= next_check) {
      for (const auto& connection : connections()) connection->close_if_session_ended();
      next_check = now + kEndedSessionPollPeriod;
    }
    return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(next_check - now).count());
  }

  std::vector<std::shared_ptr<StreamConnection>> connections() const {
    std::vector<std::shared_ptr<StreamConnection>> all;
    for (const auto& loop : loops) {
      for (const auto& served : loop->all()) {
        auto connection = std::dynamic_pointer_cast<StreamConnection>(served);
        if (connection) all.push_back(std::move(connection));
      }
    }
    return all;
  }

  StreamContext context;
  std::vector<protocol::Address> addresses;
  std::vector<std::shared_ptr<StreamAcceptor>> acceptors;
  Clock::time_point next_check{};  // used by the thread of the first loop
  StreamAcceptor::Loops loops;     // destroyed first: they use the members above
};

StreamListener::StreamListener(RequestHandler& handler, const StreamListenerOptions& options) {
  require_valid(options);
  raise_open_files();
  impl_ = std::make_unique<Impl>(handler, options);
}

StreamListener::~StreamListener() = default;

const std::vector<protocol::Address>& StreamListener::addresses() const noexcept {
  return impl_->addresses;
}

void StreamListener::drain(uint32_t most_ms) {
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(most_ms);
  impl_->context.draining = true;
  const auto idle = [this] {
    bool all = true;
    for (const auto& connection : impl_->connections()) {
      if (!connection->idle()) all = false;
    }
    return all;
  };
  while (!idle() && Clock::now() < deadline) {
    std::this_thread::sleep_for(kDrainPollPeriod);
  }
}

}  // namespace hbm::box::server::listener
