#include "communicator/failure/node_death_watch.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/log.h"

namespace hbm::failure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kConnectPatience{500};  // for each address
constexpr std::chrono::seconds kAcceptPatience{5};
constexpr std::chrono::seconds kReplyPatience{6};
constexpr std::string_view kReply = "hbm death watch acknowledged";

// The connections that a forked child closes.
class Inheritance {
 public:
  static void add(int descriptor) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &close_all); });
    for (auto& slot : slots()) {
      int none = -1;
      if (slot.compare_exchange_strong(none, descriptor)) return;
    }
  }
  static void remove(int descriptor) {
    for (auto& slot : slots()) {
      int ours = descriptor;
      if (slot.compare_exchange_strong(ours, -1)) return;
    }
  }

 private:
  using Slots = std::array<std::atomic<int>, 4096>;
  static Slots& slots() {
    static Slots* const all = [] {
      auto* const made = new Slots;
      for (auto& slot : *made) slot.store(-1);
      return made;
    }();
    return *all;
  }
  static void close_all() {
    for (auto& slot : slots()) {
      const int descriptor = slot.exchange(-1);
      if (descriptor >= 0) close(descriptor);
    }
  }
};

std::string addresses() {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) return {};
  std::string text;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    if (each->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> address{};
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(each->ifa_addr)->sin_addr, address.data(),
              address.size());
    text += std::string(" ") + address.data();
  }
  freeifaddrs(found);
  return text;
}

Descriptor listen_somewhere(uint16_t* port) {
  Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof(any);
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&any), length) != 0 ||
      listen(listener.get(), 8) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&any), &length) != 0) {
    return Descriptor();
  }
  *port = ntohs(any.sin_port);
  return listener;
}

bool ready(int descriptor, short events, std::chrono::milliseconds patience) {
  pollfd waiting{descriptor, events, 0};
  return poll(&waiting, 1, static_cast<int>(std::max<int64_t>(patience.count(), 0))) == 1;
}

// `where`: the port and the addresses of the other side, which knows us by `hello`. Addresses of
// the loopback mean this machine, so they count only if the other side is `near`.
Descriptor connect_to(const std::string& where, bool near, const std::string& hello) {
  std::istringstream words(where);
  uint16_t port = 0;
  words >> port;
  for (std::string address; words >> address;) {
    Descriptor connection(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    inet_pton(AF_INET, address.c_str(), &to.sin_addr);
    if (!connection || (!near && address.starts_with("127."))) continue;
    if (connect(connection.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0 &&
        (errno != EINPROGRESS || !ready(connection.get(), POLLOUT, kConnectPatience))) {
      continue;
    }
    if (send(connection.get(), hello.data(), hello.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(hello.size())) {
      continue;
    }
    return connection;
  }
  return Descriptor();
}

Descriptor answer(const Descriptor& listener, const std::string& hello) {
  const auto end = Clock::now() + kAcceptPatience;
  const auto left = [&] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
  };
  while (left().count() > 0) {
    if (!ready(listener.get(), POLLIN, left())) break;
    Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection || !ready(connection.get(), POLLIN, std::min(left(), kConnectPatience)))
      continue;
    std::string said(hello.size(), '\0');
    if (recv(connection.get(), said.data(), said.size(), 0) == static_cast<ssize_t>(hello.size()) &&
        said == hello &&
        send(connection.get(), kReply.data(), kReply.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(kReply.size())) {
      return connection;
    }
  }
  return Descriptor();
}

// Whether it was the right one who answered.
bool acknowledged(const Descriptor& connection) {
  if (!connection || !ready(connection.get(), POLLIN, kReplyPatience)) return false;
  std::string reply(kReply.size(), '\0');
  return recv(connection.get(), reply.data(), reply.size(), 0) ==
             static_cast<ssize_t>(kReply.size()) &&
         reply == kReply;
}

bool ended(int connection) {
  char byte = 0;
  const ssize_t got = recv(connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

}  // namespace

NodeDeathWatch::NodeDeathWatch(const bootstrap::Rendezvous& rendezvous,
                               const std::vector<int>& node_of) {
  const bootstrap::Participant& participant = rendezvous.participant;
  std::vector<int> ring;  // the first rank of each node
  std::set<int> seen;
  for (int rank = 0; rank < participant.size; ++rank) {
    if (seen.insert(node_of[static_cast<size_t>(rank)]).second) ring.push_back(rank);
  }
  const auto place = std::find(ring.begin(), ring.end(), participant.rank);
  const bool member = place != ring.end() && ring.size() > 1;
  const auto everyone = bootstrap::everyone(participant.size);

  uint16_t port = 0;
  const Descriptor listener = member ? listen_somewhere(&port) : Descriptor();
  const auto listeners = bootstrap::gather(participant, "death_watch", everyone, [&] {
    return listener ? std::to_string(port) + addresses() : std::string();
  });
  // Named by who is called, so that a stranger on the same address is not taken for it.
  const auto hello = [&](int called) {
    return "hbm death watch " + rendezvous.members[static_cast<size_t>(called)].process +
           participant.prefix;
  };
  int next = -1;
  Descriptor connection;
  if (member) {
    next = place + 1 == ring.end() ? ring.front() : *(place + 1);
    const bootstrap::Member& self = rendezvous.members[static_cast<size_t>(participant.rank)];
    const bootstrap::Member& other = rendezvous.members[static_cast<size_t>(next)];
    const bool near =
        self.boot_id == other.boot_id && self.network_namespace == other.network_namespace;
    connection = connect_to(listeners[static_cast<size_t>(next)], near, hello(next));
  }
  const auto reached = bootstrap::gather(participant, "death_watch reached", everyone,
                                         [&] { return std::string(connection ? "1" : "0"); });
  if (!member) return;
  const int previous = place == ring.begin() ? ring.back() : *(place - 1);
  Descriptor theirs;
  if (reached[static_cast<size_t>(previous)] == "1")
    theirs = answer(listener, hello(participant.rank));
  if (theirs) connections_.emplace_back(previous, std::move(theirs));
  if (acknowledged(connection)) {
    connections_.emplace_back(next, std::move(connection));
  } else {
    log::warn(participant.group + ": no connection to rank " + std::to_string(next) + " on " +
              rendezvous.members[static_cast<size_t>(next)].host +
              "; if it dies while no other rank of its node lives, that shows by the timeout only");
  }
  for (const auto& [rank, each] : connections_) Inheritance::add(each.get());
}

NodeDeathWatch::~NodeDeathWatch() {
  for (auto& [rank, connection] : connections_) {
    if (fork_.in_child()) {
      connection.release();  // closed when the child was forked
    } else {
      Inheritance::remove(connection.get());
    }
  }
}

std::vector<int> NodeDeathWatch::dead() const {
  std::vector<int> found;
  for (const auto& [rank, connection] : connections_) {
    if (ended(connection.get())) found.push_back(rank);
  }
  return found;
}

}  // namespace hbm::failure
