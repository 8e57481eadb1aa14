#include "communicator/tcp/connect.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/tcp.h"
#include "base/unshared_socket.h"
#include "bootstrap/gather.h"
#include "communicator/tcp/tuning.h"

namespace hbm::communicator::tcp {
namespace {

using Clock = std::chrono::steady_clock;
using Token = std::array<char, 32>;

constexpr uint64_t kHelloMagic = 0x316f6c6c65486268;
constexpr uint64_t kReplyMagic = 0x31796c7065526268;
constexpr uint64_t kConfirmation = 0x316d7266436f6268;

struct Hello {
  uint64_t magic = kHelloMagic;
  uint64_t group_number = 0;
  uint64_t rank = 0;
  Token token{};
};
struct Reply {
  uint64_t magic = kReplyMagic;
  Token token{};
};

// A rank's record in the step "links".
struct Place {
  uint16_t port = 0;
  Token token{};
  std::vector<std::string> addresses;
};

Token token_of(const std::string& text) {
  Token token{};
  std::copy_n(text.begin(), std::min(text.size(), token.size()), token.begin());
  return token;
}

Place parse(const std::string& record) {
  std::istringstream words(record);
  Place place;
  std::string token;
  words >> place.port >> token;
  place.token = token_of(token);
  for (std::string address; words >> address;) place.addresses.push_back(address);
  return place;
}

[[noreturn]] void throw_no_socket(const std::string& what, int error) {
  throw Error(ErrorKind::kUnavailable, "this rank cannot " + what + ": " + listening_error(error) +
                                           (error == EMFILE ? " (raise `ulimit -n`)" : ""));
}

template <typename Message>
bool send_whole(int socket, const Message& message) {
  return send(socket, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof message);
}

// Bytes of a message that arrive one after another.
struct Partial {
  std::array<char, sizeof(Hello)> bytes;
  size_t size = 0;

  // Returns true if `message` has arrived whole. Sets `closed` if no more bytes will come.
  template <typename Message>
  bool read(int socket, Message& message, bool& closed) {
    static_assert(sizeof(Message) <= sizeof bytes);
    const ssize_t got = recv(socket, bytes.data() + size, sizeof(Message) - size, MSG_DONTWAIT);
    closed = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    if (got > 0) size += static_cast<size_t>(got);
    if (size < sizeof(Message)) return false;
    std::memcpy(&message, bytes.data(), sizeof(Message));
    size = 0;
    return true;
  }
};

// A call to a higher rank.
struct Call {
  enum class Step { kPausing, kConnecting, kGreeted, kUp };
  size_t rank;
  std::vector<std::string> addresses;
  size_t next = 0;  // the address to try next
  Step step = Step::kPausing;
  Clock::time_point until{};  // of this step
  UnsharedSocket socket;
  Partial partial;
  std::string failures;  // at the addresses that were tried last
};

// A caller at the listener.
struct Caller {
  UnsharedSocket socket;
  Clock::time_point until;
  Partial partial;
  int rank = -1;  // -1: has not said hello
};

class Connecting {
 public:
  Connecting(const bootstrap::Rendezvous& rendezvous, uint64_t group_number,
             UnsharedSocket listener, const std::vector<std::string>& records, const Token& own)
      : participant_(rendezvous.participant),
        members_(rendezvous.members),
        group_number_(group_number),
        own_(own),
        listener_(std::move(listener)),
        sockets_(records.size()) {
    const auto& self = members_[static_cast<size_t>(participant_.rank)];
    for (const std::string& record : records) places_.push_back(parse(record));
    for (size_t rank = static_cast<size_t>(participant_.rank) + 1; rank < places_.size(); ++rank) {
      Call call;
      call.rank = rank;
      const auto& member = members_[rank];
      const bool near = member.boot_id == self.boot_id &&
                        member.network_namespace == self.network_namespace &&
                        !self.network_namespace.empty();
      // A loopback address leads to this network namespace.
      if (near) call.addresses.push_back("127.0.0.1");
      for (const std::string& address : places_[rank].addresses) {
        if (!address.starts_with("127.")) call.addresses.push_back(address);
      }
      calls_.push_back(std::move(call));
    }
  }

  std::vector<Descriptor> run() {
    const std::vector<int> everyone = bootstrap::everyone(participant_.size);
    bootstrap::AbortWatcher aborts(participant_, everyone);
    while (!done()) {
      for (Call& call : calls_) advance(call);
      accept_callers();
      for (Caller& caller : callers_) advance(caller);
      std::erase_if(callers_, [](const Caller& caller) { return !caller.socket; });
      if (done()) break;
      aborts.check();
      if (Clock::now() >= participant_.deadline) throw_late();
      wait();
    }
    std::vector<Descriptor> made(sockets_.size());
    for (size_t rank = 0; rank < sockets_.size(); ++rank) {
      if (!sockets_[rank]) continue;
      const int on = 1;
      setsockopt(sockets_[rank].get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      made[rank] = sockets_[rank].release();
    }
    return made;
  }

 private:
  bool done() const {
    return static_cast<size_t>(std::ranges::count_if(
               sockets_, [](const UnsharedSocket& socket) { return static_cast<bool>(socket); })) +
               1 ==
           sockets_.size();
  }

  void wait() {
    std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
    if (!accepts()) waits.clear();
    for (const Call& call : calls_) {
      if (!call.socket) continue;
      const bool connecting = call.step == Call::Step::kConnecting;
      waits.push_back({call.socket.get(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0});
    }
    for (const Caller& caller : callers_) waits.push_back({caller.socket.get(), POLLIN, 0});
    poll(waits.data(), waits.size(), static_cast<int>(kConnectCheckPeriod.count()));
  }

  // -- As a caller

  void start(Call& call) {
    call.partial = {};
    call.socket.reset();
    Descriptor made = start_to_connect(call.addresses[call.next++], places_[call.rank].port);
    if (!made && errno == EMFILE) throw_no_socket("open a socket", errno);
    if (!made) return fail(call, std::strerror(errno));
    call.socket = UnsharedSocket(std::move(made));
    call.step = Call::Step::kConnecting;
    call.until = Clock::now() + kAddressTimeout;
  }

  // Gives up the address, and tries the next one in the next turn.
  void fail(Call& call, const std::string& why) {
    if (call.next == 1) call.failures.clear();
    call.failures +=
        (call.failures.empty() ? "" : "; ") + call.addresses[call.next - 1] + ": " + why;
    call.socket.reset();
    call.step = Call::Step::kPausing;
    call.until = Clock::now();
    if (call.next == call.addresses.size()) {
      call.next = 0;
      call.until += kRetryPause;
    }
  }

  void advance(Call& call) {
    const bool late = Clock::now() >= call.until;
    switch (call.step) {
      case Call::Step::kPausing:
        if (late && !call.addresses.empty()) start(call);
        return;
      case Call::Step::kConnecting: {
        pollfd ready{call.socket.get(), POLLOUT, 0};
        if (poll(&ready, 1, 0) != 1) {
          if (late) fail(call, "no answer in time");
          return;
        }
        const int error = connection_error(call.socket.get());
        if (error != 0) return fail(call, std::strerror(error));
        const Hello hello{kHelloMagic, group_number_, static_cast<uint64_t>(participant_.rank),
                          places_[call.rank].token};
        if (!send_whole(call.socket.get(), hello)) return fail(call, std::strerror(errno));
        call.step = Call::Step::kGreeted;
        call.until = Clock::now() + kReplyTimeout;
        return;
      }
      case Call::Step::kGreeted: {
        Reply reply;
        bool closed = false;
        if (call.partial.read(call.socket.get(), reply, closed)) {
          if (reply.magic != kReplyMagic || reply.token != own_) {
            return fail(call, "another program answers there");
          }
          if (!send_whole(call.socket.get(), kConfirmation))
            return fail(call, std::strerror(errno));
          call.step = Call::Step::kUp;
          sockets_[call.rank] = std::move(call.socket);
        } else if (closed) {
          fail(call, "the connection was closed");
        } else if (late) {
          fail(call, "no answer in time");
        }
        return;
      }
      case Call::Step::kUp:
        return;
    }
  }

  // -- As the listener

  bool accepts() const {
    return callers_.size() < static_cast<size_t>(participant_.rank) + kMostStrangers;
  }

  void accept_callers() {
    while (accepts()) {
      Descriptor made(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!made) {
        if (errno == EMFILE || errno == ENFILE) throw_no_socket("accept a connection", errno);
        return;  // no caller waits, or the caller has gone
      }
      callers_.push_back({UnsharedSocket(std::move(made)), Clock::now() + kHelloTimeout, {}, -1});
    }
  }

  void advance(Caller& caller) {
    bool closed = false;
    if (caller.rank < 0) {
      Hello hello;
      if (caller.partial.read(caller.socket.get(), hello, closed)) {
        if (hello.magic != kHelloMagic || hello.group_number != group_number_ ||
            hello.token != own_ || hello.rank >= static_cast<uint64_t>(participant_.rank)) {
          return caller.socket.reset();
        }
        caller.rank = static_cast<int>(hello.rank);
        caller.until = participant_.deadline;
        const Reply reply{kReplyMagic, places_[hello.rank].token};
        if (!send_whole(caller.socket.get(), reply)) return caller.socket.reset();
      }
    }
    if (!closed && caller.rank >= 0) {
      uint64_t confirmation = 0;
      if (caller.partial.read(caller.socket.get(), confirmation, closed)) {
        if (confirmation != kConfirmation) return caller.socket.reset();
        sockets_[static_cast<size_t>(caller.rank)] = std::move(caller.socket);
        return;
      }
    }
    if (closed || Clock::now() >= caller.until) caller.socket.reset();
  }

  // -- Errors

  [[noreturn]] void throw_late() const {
    std::string text;
    for (size_t rank = 0; rank < sockets_.size(); ++rank) {
      if (sockets_[rank] || static_cast<int>(rank) == participant_.rank) continue;
      text += "\n  " + bootstrap::rank_name(static_cast<int>(rank), members_[rank]);
      if (static_cast<int>(rank) < participant_.rank) {
        text += " has not connected to this rank";
        continue;
      }
      const auto call = std::ranges::find(calls_, rank, &Call::rank);
      text += " at port " + std::to_string(places_[rank].port) + " of";
      for (const std::string& address : call->addresses) text += " " + address;
      if (!call->failures.empty()) text += " (" + call->failures + ")";
    }
    throw Error(ErrorKind::kTimeout,
                "rank " + std::to_string(participant_.rank) + " of " + participant_.group +
                    " has no TCP connection in time to:" + text +
                    "\nThe ranks share no MPI world, so they connect directly. Let them reach one "
                    "another at these addresses and ports (docs/running.md, \"Processes that "
                    "come later\").");
  }

  const bootstrap::Participant& participant_;
  const std::vector<bootstrap::Member>& members_;
  const uint64_t group_number_;
  const Token own_;
  UnsharedSocket listener_;
  std::vector<Place> places_;
  std::vector<Call> calls_;
  std::vector<Caller> callers_;
  std::vector<UnsharedSocket> sockets_;  // by rank; none for this rank
};

}  // namespace

std::shared_ptr<Links> connect(const bootstrap::Rendezvous& rendezvous, uint64_t group_number) {
  const bootstrap::Participant& participant = rendezvous.participant;
  const std::vector<int> everyone = bootstrap::everyone(participant.size);
  const std::string token = bootstrap::random_id();
  UnsharedSocket listener;
  const std::vector<std::string> records = gather(participant, "links", everyone, [&] {
    uint16_t port = 0;
    listener = UnsharedSocket(listen_on_all_addresses(port));
    if (!listener) throw_no_socket("listen for the connections of other ranks", errno);
    std::string record = std::to_string(port) + " " + token;
    for (const std::string& address : machine_addresses()) record += " " + address;
    return record;
  });
  Connecting connecting(rendezvous, group_number, std::move(listener), records, token_of(token));
  return std::make_shared<Links>(connecting.run(), participant.group);
}

}  // namespace hbm::communicator::tcp
