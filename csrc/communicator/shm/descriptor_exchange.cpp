#include "communicator/shm/descriptor_exchange.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "communicator/shm/tuning.h"

namespace hbm::communicator::shm {
namespace {

using std::chrono::milliseconds;

constexpr int kUnknown = -1;

std::string key_of(const Greeting& greeting) {
  const auto& key = greeting.key;
  return {key.begin(), std::find(key.begin(), key.end(), '\0')};
}

std::string list(const std::set<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
  return text;
}

struct PeerConnection {
  Descriptor socket;
  int rank;
  bool sent = false;
  bool received = false;

  bool complete() const { return sent && received; }
};

class DescriptorExchange {
 public:
  DescriptorExchange(const bootstrap::Participant& participant, const Introduction& own,
                     const std::map<std::string, int>& peers)
      : participant_(participant), own_(own), peers_(peers) {}

  void add(Descriptor socket, int rank) { connections_.push_back({std::move(socket), rank}); }

  std::map<int, Introduction> run() {
    for (;;) {
      bool stalled = false;
      for (PeerConnection& connection : connections_) stalled |= !advance(connection);
      std::erase_if(connections_, [](const PeerConnection& connection) {
        return !connection.socket || connection.complete();
      });
      if (connections_.empty() || only_strangers()) break;
      await(stalled);
    }
    if (const std::set<int> ended = missing(); !ended.empty()) gone(ended);
    return std::move(met_);
  }

 private:
  // Returns true if only connections of unknown callers are left, and every peer has introduced
  // itself or is lost.
  bool only_strangers() const {
    return std::all_of(
               connections_.begin(), connections_.end(),
               [](const PeerConnection& connection) { return connection.rank == kUnknown; }) &&
           std::all_of(peers_.begin(), peers_.end(), [this](const auto& peer) {
             return met_.contains(peer.second) || lost_.contains(peer.second);
           });
  }

  // Returns false if the connection cannot send now.
  bool advance(PeerConnection& connection) {
    if (!connection.received) receive_on(connection);
    if (!connection.socket || connection.rank == kUnknown || connection.sent) return true;
    std::string cause;
    const Delivery sent = send(connection.socket.get(), &own_.greeting, sizeof(Greeting),
                               {own_.memory.get(), own_.pidfd.get()}, cause);
    if (sent == Delivery::kGone) lose(connection, cause);
    connection.sent = sent == Delivery::kDone;
    return sent != Delivery::kLater;
  }

  void receive_on(PeerConnection& connection) {
    Introduction other;
    std::vector<Descriptor> descriptors;
    std::string cause;
    const Delivery received =
        receive(connection.socket.get(), &other.greeting, sizeof(Greeting), descriptors, cause);
    if (received == Delivery::kLater) return;
    if (received == Delivery::kGone) return lose(connection, cause);
    if (descriptors.size() != 2) {
      return lose(connection, "it sent " + std::to_string(descriptors.size()) + " descriptors");
    }
    const auto peer = peers_.find(key_of(other.greeting));
    if (peer == peers_.end()) {
      return lose(connection, "it is the process " + key_of(other.greeting) + ", which is no peer");
    }
    if (connection.rank != kUnknown && connection.rank != peer->second) {
      return lose(connection, "it is rank " + std::to_string(peer->second));
    }
    if (met_.contains(peer->second)) {
      return lose(connection, "it is rank " + std::to_string(peer->second) + " a second time");
    }
    connection.rank = peer->second;
    connection.received = true;
    other.memory = std::move(descriptors[0]);
    other.pidfd = std::move(descriptors[1]);
    met_.emplace(connection.rank, std::move(other));
  }

  // Closes a connection that has failed. The exchange with other ranks continues, so that they do
  // not count as lost. The loss of an unknown caller is no error: such a caller may only have
  // checked whether a process listens here.
  void lose(PeerConnection& connection, const std::string& cause) {
    if (connection.rank != kUnknown) {
      lost_.emplace(connection.rank, cause);
    } else {
      log::info("rank " + std::to_string(participant_.rank) + " of " + participant_.group +
                " refuses an unknown caller: " + cause);
    }
    connection.socket = Descriptor();
  }

  void await(bool stalled) {
    const auto left =
        std::chrono::ceil<milliseconds>(participant_.deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) late();
    const std::set<int> expected = missing();
    participant_.require_alive({expected.begin(), expected.end()});
    aborts_.check();
    std::vector<pollfd> waits;
    for (const PeerConnection& connection : connections_) {
      if (!connection.received) waits.push_back({connection.socket.get(), POLLIN, 0});
    }
    const milliseconds longest =
        stalled ? kDescriptorRetryPause : std::min(left, kMeetingCheckPeriod);
    poll(waits.data(), waits.size(), static_cast<int>(longest.count()));
  }

  // Returns the ranks that have not sent their descriptors, or have not received this rank's.
  std::set<int> missing() const {
    std::set<int> ranks;
    for (const auto& [rank, cause] : lost_) ranks.insert(rank);
    for (const auto& [key, rank] : peers_) {
      if (!met_.contains(rank)) ranks.insert(rank);
    }
    for (const PeerConnection& connection : connections_) {
      if (connection.rank != kUnknown) ranks.insert(connection.rank);
    }
    return ranks;
  }

  [[noreturn]] void gone(const std::set<int>& ranks) const {
    std::string causes;
    for (const int rank : ranks) {
      const auto lost = lost_.find(rank);
      causes += (causes.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (" +
                (lost == lost_.end() ? "it has not called" : lost->second) + ")";
    }
    throw Error(ErrorKind::kPeer, "rank " + std::to_string(participant_.rank) + " of " +
                                      participant_.group +
                                      " could not exchange descriptors of memory with " + causes);
  }

  [[noreturn]] void late() const {
    throw Error(ErrorKind::kTimeout,
                "rank " + std::to_string(participant_.rank) + " of " + participant_.group +
                    " did not exchange descriptors of memory with all its local peers before the "
                    "timeout; missing: " +
                    list(missing()));
  }

  const bootstrap::Participant& participant_;
  const Introduction& own_;
  const std::map<std::string, int>& peers_;
  std::vector<PeerConnection> connections_;
  std::map<int, Introduction> met_;
  std::map<int, std::string> lost_;  // the cause, by rank
  const std::vector<int> nobody_;    // for aborts_: await() checks for deaths itself
  bootstrap::AbortWatcher aborts_{participant_, nobody_};
};

}  // namespace

std::map<int, Introduction> exchange(const bootstrap::Participant& participant,
                                     const Introduction& own, std::map<int, Descriptor> called,
                                     PeerListener& listener,
                                     const std::map<std::string, int>& peers) {
  DescriptorExchange exchange(participant, own, peers);
  for (auto& [rank, socket] : called) exchange.add(std::move(socket), rank);
  for (Descriptor& caller : listener.callers()) exchange.add(std::move(caller), kUnknown);
  return exchange.run();
}

}  // namespace hbm::communicator::shm
