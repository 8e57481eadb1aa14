#include "communicator/failure/node_links.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>

#include "communicator/failure/tuning.h"

namespace hbm::failure {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view kHello = "hbm link ";
constexpr std::string_view kReply = "hbm link up";
constexpr size_t kIdLength = 32;

// The links that a forked child closes.
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
  using Slots = std::array<std::atomic<int>, kLinksClosedInChildren>;
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
      if (descriptor >= 0) ::close(descriptor);
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

// Has the kernel ask the other machine every second whether it is there, and never give up.
void keep_asking(int socket) {
  const int on = 1;
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kProbePeriodSeconds, sizeof kProbePeriodSeconds);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kProbePeriodSeconds, sizeof kProbePeriodSeconds);
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &kKernelPatienceMilliseconds,
             sizeof kKernelPatienceMilliseconds);
}

bool ready(int descriptor, short events) {
  pollfd waiting{descriptor, events, 0};
  return poll(&waiting, 1, 0) == 1;
}

bool send_all(int socket, std::string_view text) {
  return send(socket, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

// Packets this small come whole.
std::string receive(int socket, size_t bytes) {
  std::string text(bytes, '\0');
  const ssize_t got = recv(socket, text.data(), text.size(), MSG_DONTWAIT);
  return got == static_cast<ssize_t>(bytes) ? text : std::string();
}

// Whether the kernel at the other end has closed the connection, or knows nothing of it any more.
bool ended(int socket) {
  char byte = 0;
  const ssize_t got = recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && (errno == ECONNRESET || errno == EPIPE));
}

}  // namespace

NodeLinks::NodeLinks(std::string self) : self_(std::move(self)) {}

NodeLinks::~NodeLinks() {
  for (NodeLink& link : links_) close(link);
  stop_listening();
}

void NodeLinks::stop_listening() {
  if (listener_) Inheritance::remove(listener_.get());
  listener_ = Descriptor();
  where_.clear();
}

std::string NodeLinks::listen() {
  if (listener_) return where_;
  Descriptor made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof(any);
  if (!made || bind(made.get(), reinterpret_cast<sockaddr*>(&any), length) != 0 ||
      ::listen(made.get(), SOMAXCONN) != 0 ||
      getsockname(made.get(), reinterpret_cast<sockaddr*>(&any), &length) != 0) {
    return {};
  }
  listener_ = std::move(made);
  Inheritance::add(listener_.get());
  return where_ = std::to_string(ntohs(any.sin_port)) + addresses();
}

void NodeLinks::call(const std::string& process, const std::string& where, bool near) {
  NodeLink link{Step::kConnecting, process, {}, {}, 0, {}};
  std::istringstream words(where);
  words >> link.port;
  for (std::string address; words >> address;) {
    if (near || !address.starts_with("127.")) link.addresses.push_back(address);
  }
  if (try_next_address(link)) links_.push_back(std::move(link));
}

bool NodeLinks::try_next_address(NodeLink& link) {
  while (!link.addresses.empty()) {
    const std::string address = link.addresses.front();
    link.addresses.erase(link.addresses.begin());
    close(link);
    Descriptor made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(link.port);
    inet_pton(AF_INET, address.c_str(), &to.sin_addr);
    if (!made || (connect(made.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0 &&
                  errno != EINPROGRESS)) {
      continue;
    }
    link.socket = std::move(made);
    Inheritance::add(link.socket.get());
    link.step = Step::kConnecting;
    link.until = Clock::now() + kLinkConnectPatience;
    return true;
  }
  close(link);
  return false;
}

void NodeLinks::close(NodeLink& link) {
  if (link.socket) Inheritance::remove(link.socket.get());
  link.socket = Descriptor();
  link.step = Step::kClosed;
}

bool NodeLinks::linked(const std::string& process) const {
  return std::ranges::any_of(links_, [&](const NodeLink& link) {
    return link.process == process && link.step == Step::kUp;
  });
}

bool NodeLinks::calling(const std::string& process) const {
  return std::ranges::any_of(links_, [&](const NodeLink& link) {
    return link.process == process &&
           (link.step == Step::kConnecting || link.step == Step::kGreeted);
  });
}

bool NodeLinks::greeted(const std::string& process) const {
  return std::ranges::any_of(links_, [&](const NodeLink& link) {
    return link.process == process && (link.step == Step::kGreeted || link.step == Step::kUp);
  });
}

void NodeLinks::add_to(std::vector<pollfd>& waits) const {
  if (listener_ && Clock::now() >= accept_after_) waits.push_back({listener_.get(), POLLIN, 0});
  for (const NodeLink& link : links_) {
    const short events = link.step == Step::kConnecting ? POLLOUT : POLLIN;
    waits.push_back({link.socket.get(), events, 0});
  }
}

std::vector<std::string> NodeLinks::advance() {
  accept_callers();
  std::vector<std::string> dead;
  for (NodeLink& link : links_) {
    const bool was_up = link.step == Step::kUp;
    advance(link);
    if (was_up && link.step == Step::kClosed) dead.push_back(link.process);
  }
  std::erase_if(links_, [](const NodeLink& link) { return link.step == Step::kClosed; });
  return dead;
}

void NodeLinks::advance(NodeLink& link) {
  const int socket = link.socket.get();
  const bool late = Clock::now() >= link.until;
  switch (link.step) {
    case Step::kConnecting:
      if (ready(socket, POLLOUT)) {
        int failure = 0;
        socklen_t length = sizeof failure;
        getsockopt(socket, SOL_SOCKET, SO_ERROR, &failure, &length);
        if (failure == 0 && send_all(socket, std::string(kHello) + link.process + self_)) {
          link.step = Step::kGreeted;
          link.until = Clock::now() + kHelloReplyPatience;
        } else {
          try_next_address(link);
        }
      } else if (late) {
        try_next_address(link);
      }
      return;
    case Step::kGreeted:
      if (ready(socket, POLLIN)) {
        if (receive(socket, kReply.size()) == kReply) {
          keep_asking(socket);
          link.step = Step::kUp;
        } else {
          try_next_address(link);  // a stranger at that address
        }
      } else if (late) {
        try_next_address(link);
      }
      return;
    case Step::kAccepted:
      if (ready(socket, POLLIN)) {
        const std::string hello = receive(socket, kHello.size() + 2 * kIdLength);
        if (hello.starts_with(std::string(kHello) + self_)) {
          send_all(socket, kReply);  // if it has ended meanwhile, that shows next
          keep_asking(socket);
          link.process = hello.substr(kHello.size() + kIdLength);
          link.step = Step::kUp;
        } else {
          close(link);
        }
      } else if (late) {
        close(link);
      }
      return;
    case Step::kUp:
      if (ended(socket)) close(link);
      return;
    case Step::kClosed:
      return;
  }
}

void NodeLinks::accept_callers() {
  while (listener_ && Clock::now() >= accept_after_) {
    Descriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!caller) {
      // The caller stays in the queue, and would wake poll() at once.
      if (errno != EAGAIN && errno != EINTR) accept_after_ = Clock::now() + kAcceptPause;
      return;
    }
    const auto strangers = std::ranges::count_if(
        links_, [](const NodeLink& link) { return link.step == Step::kAccepted; });
    if (static_cast<size_t>(strangers) >= kMostUnknownCallers) continue;
    Inheritance::add(caller.get());
    links_.push_back(
        {Step::kAccepted, {}, std::move(caller), {}, 0, Clock::now() + kHelloPatience});
    advance(links_.back());  // who has said hello is no stranger any more
  }
}

std::optional<milliseconds> NodeLinks::silence(const std::string& process) const {
  std::optional<milliseconds> least;
  for (const NodeLink& link : links_) {
    if (link.process != process || link.step != Step::kUp) continue;
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(link.socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    const milliseconds since(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
    if (!least || since < *least) least = since;
  }
  return least;
}

}  // namespace hbm::failure
