#include "communicator/failure/liveness_connections.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/close_in_children.h"
#include "base/tcp.h"
#include "communicator/failure/tuning.h"

namespace hbm::communicator::failure {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view kHello = "hbm link ";
constexpr std::string_view kReply = "hbm link up";
constexpr size_t kIdLength = 32;

// Makes the kernel probe the other machine every second, until that machine has been silent for a
// day.
void keep_asking(int socket) {
  const int on = 1;
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kProbePeriodSeconds, sizeof kProbePeriodSeconds);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kProbePeriodSeconds, sizeof kProbePeriodSeconds);
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &kKernelTimeoutMilliseconds,
             sizeof kKernelTimeoutMilliseconds);
}

bool ready(int descriptor, short events) {
  pollfd waiting{descriptor, events, 0};
  return poll(&waiting, 1, 0) == 1;
}

bool send_all(int socket, std::string_view text) {
  return send(socket, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

// Returns `bytes` bytes; an empty text if fewer have arrived. Each text that is sent here fits into
// one packet, so its bytes arrive together.
std::string receive(int socket, size_t bytes) {
  std::string text(bytes, '\0');
  const ssize_t got = recv(socket, text.data(), text.size(), MSG_DONTWAIT);
  return got == static_cast<ssize_t>(bytes) ? text : std::string();
}

// Returns true if the kernel at the other end has closed the connection, or no longer knows the
// connection.
bool ended(int socket) {
  char byte = 0;
  const ssize_t got = recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && (errno == ECONNRESET || errno == EPIPE));
}

}  // namespace

LivenessConnections::LivenessConnections(std::string self) : self_(std::move(self)) {}

LivenessConnections::~LivenessConnections() {
  for (LivenessConnection& connection : connections_) close(connection);
  stop_listening();
}

void LivenessConnections::stop_listening() {
  if (listener_) keep_in_children(listener_.get());
  listener_ = Descriptor();
  where_.clear();
}

std::string LivenessConnections::listen(std::string& failure) {
  if (listener_) return where_;
  uint16_t port = 0;
  Descriptor made = listen_on_all_addresses(port);
  if (!made) {
    failure = listening_error(errno);
    return {};
  }
  listener_ = std::move(made);
  close_in_children(listener_.get());
  where_ = std::to_string(port);
  for (const std::string& address : machine_addresses()) where_ += " " + address;
  return where_;
}

void LivenessConnections::call(const std::string& process, const std::string& where, bool near) {
  LivenessConnection connection{Step::kConnecting, process, {}, {}, 0, {}};
  std::istringstream words(where);
  words >> connection.port;
  for (std::string address; words >> address;) {
    if (near || !address.starts_with("127.")) connection.addresses.push_back(address);
  }
  if (try_next_address(connection)) connections_.push_back(std::move(connection));
}

bool LivenessConnections::try_next_address(LivenessConnection& connection) {
  while (!connection.addresses.empty()) {
    const std::string address = connection.addresses.front();
    connection.addresses.erase(connection.addresses.begin());
    close(connection);
    Descriptor made = start_to_connect(address, connection.port);
    if (!made) continue;
    connection.socket = std::move(made);
    close_in_children(connection.socket.get());
    connection.step = Step::kConnecting;
    connection.until = Clock::now() + kAddressConnectTimeout;
    return true;
  }
  close(connection);
  return false;
}

void LivenessConnections::close(LivenessConnection& connection) {
  if (connection.socket) keep_in_children(connection.socket.get());
  connection.socket = Descriptor();
  connection.step = Step::kClosed;
}

bool LivenessConnections::connected(const std::string& process) const {
  return std::ranges::any_of(connections_, [&](const LivenessConnection& connection) {
    return connection.process == process && connection.step == Step::kUp;
  });
}

bool LivenessConnections::calling(const std::string& process) const {
  return std::ranges::any_of(connections_, [&](const LivenessConnection& connection) {
    return connection.process == process &&
           (connection.step == Step::kConnecting || connection.step == Step::kGreeted);
  });
}

bool LivenessConnections::greeted(const std::string& process) const {
  return std::ranges::any_of(connections_, [&](const LivenessConnection& connection) {
    return connection.process == process &&
           (connection.step == Step::kGreeted || connection.step == Step::kUp);
  });
}

void LivenessConnections::add_to(std::vector<pollfd>& waits) const {
  if (listener_ && Clock::now() >= accept_after_) waits.push_back({listener_.get(), POLLIN, 0});
  for (const LivenessConnection& connection : connections_) {
    const short events = connection.step == Step::kConnecting ? POLLOUT : POLLIN;
    waits.push_back({connection.socket.get(), events, 0});
  }
}

std::vector<std::string> LivenessConnections::advance() {
  accept_callers();
  std::vector<std::string> dead;
  for (LivenessConnection& connection : connections_) {
    const bool was_up = connection.step == Step::kUp;
    advance(connection);
    if (was_up && connection.step == Step::kClosed) dead.push_back(connection.process);
  }
  std::erase_if(connections_, [](const LivenessConnection& connection) {
    return connection.step == Step::kClosed;
  });
  return dead;
}

void LivenessConnections::advance(LivenessConnection& connection) {
  const int socket = connection.socket.get();
  const bool late = Clock::now() >= connection.until;
  switch (connection.step) {
    case Step::kConnecting:
      if (ready(socket, POLLOUT)) {
        if (connection_error(socket) == 0 &&
            send_all(socket, std::string(kHello) + connection.process + self_)) {
          connection.step = Step::kGreeted;
          connection.until = Clock::now() + kHelloReplyTimeout;
        } else {
          try_next_address(connection);
        }
      } else if (late) {
        try_next_address(connection);
      }
      return;
    case Step::kGreeted:
      if (ready(socket, POLLIN)) {
        if (receive(socket, kReply.size()) == kReply) {
          keep_asking(socket);
          connection.step = Step::kUp;
        } else {
          try_next_address(connection);  // another program at that address
        }
      } else if (late) {
        try_next_address(connection);
      }
      return;
    case Step::kAccepted:
      if (ready(socket, POLLIN)) {
        const std::string hello = receive(socket, kHello.size() + 2 * kIdLength);
        if (hello.starts_with(std::string(kHello) + self_)) {
          send_all(socket, kReply);  // if the caller has ended, the next step detects it
          keep_asking(socket);
          connection.process = hello.substr(kHello.size() + kIdLength);
          connection.step = Step::kUp;
        } else {
          close(connection);
        }
      } else if (late) {
        close(connection);
      }
      return;
    case Step::kUp:
      if (ended(socket)) close(connection);
      return;
    case Step::kClosed:
      return;
  }
}

void LivenessConnections::accept_callers() {
  while (listener_ && Clock::now() >= accept_after_) {
    Descriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!caller) {
      // The caller stays in the kernel's queue. Without a pause, each poll() would return
      // immediately.
      if (errno != EAGAIN && errno != EINTR) accept_after_ = Clock::now() + kAcceptPause;
      return;
    }
    const auto strangers = std::ranges::count_if(
        connections_,
        [](const LivenessConnection& connection) { return connection.step == Step::kAccepted; });
    if (static_cast<size_t>(strangers) >= kMostUnknownCallers) continue;
    close_in_children(caller.get());
    connections_.push_back(
        {Step::kAccepted, {}, std::move(caller), {}, 0, Clock::now() + kHelloTimeout});
    advance(connections_.back());  // a caller that has identified itself does not count as unknown
  }
}

std::optional<milliseconds> LivenessConnections::silence(const std::string& process) const {
  std::optional<milliseconds> least;
  for (const LivenessConnection& connection : connections_) {
    if (connection.process != process || connection.step != Step::kUp) continue;
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(connection.socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    const milliseconds since(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
    if (!least || since < *least) least = since;
  }
  return least;
}

}  // namespace hbm::communicator::failure
