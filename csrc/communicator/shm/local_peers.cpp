#include "communicator/shm/local_peers.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "bootstrap/agreement.h"
#include "bootstrap/rendezvous.h"
#include "communicator/shm/descriptor_exchange.h"
#include "memory/shared_memory.h"

namespace hbm::communicator::shm {
namespace {

// A rank's state towards another rank while they call each other.
constexpr char kKnown = 'k';    // a local peer already
constexpr char kCalled = 'c';   // this rank has called the other
constexpr char kNothing = '-';  // could not be reached; or a lower rank, which calls this one

// Facts about the other ranks of a rank's machine, which the ranks count (agreement.h). Both facts
// are true if there are no other ranks.
constexpr unsigned kAllKnown = 1;  // the other ranks are local peers already
// No other rank is a local peer yet, and this rank has called all higher ranks.
constexpr unsigned kAllCalled = 2;
// The fact after the exchange of descriptors: this rank has mapped all other ranks of its machine.
constexpr unsigned kAllMapped = 1;

// Returns the text of an errno value, and a remedy: `otherwise`, unless the limit of open files is
// the cause.
std::string remedied(int error, const std::string& otherwise) {
  return std::string(std::strerror(error)) +
         (error == EMFILE ? "; raise the limit of open files (ulimit -n)" : otherwise);
}

Descriptor own_pidfd() {
  Descriptor made(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (made) return made;
  throw Error(ErrorKind::kUnavailable,
              "cannot let the ranks of this node notice each other's death: pidfd_open: " +
                  remedied(errno, "; use Linux 5.3 or later, or choose transport=\"mpi\""));
}

Descriptor duplicate(int descriptor) {
  Descriptor made(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (made) return made;
  throw Error(ErrorKind::kUnavailable,
              "cannot duplicate the segment's descriptor: " + remedied(errno, ""));
}

// This rank's introduction, and the bytes in its segment by which a local peer checks that it has
// mapped this segment.
struct Own {
  Introduction introduction;
  std::shared_ptr<void> proof;
};

Own prepare(const std::shared_ptr<memory::SharedSegment>& segment, const bootstrap::Member& self) {
  Own own;
  Greeting& greeting = own.introduction.greeting;
  own.proof = std::shared_ptr<void>(segment->allocate_reserved(greeting.proof.size()),
                                    [segment](void* block) { segment->free(block); });
  bootstrap::random_id().copy(greeting.proof.data(), greeting.proof.size());
  std::memcpy(own.proof.get(), greeting.proof.data(), greeting.proof.size());
  greeting.proof_offset = segment->offset_of(own.proof.get());
  greeting.segment_bytes = segment->size();
  local_peer_key(self).copy(greeting.key.data(), greeting.key.size());
  own.introduction.memory = duplicate(segment->fd());
  own.introduction.pidfd = own_pidfd();
  return own;
}

bool holds(const SharedMapping& memory, const Greeting& greeting) {
  return memory.size() == greeting.segment_bytes &&
         greeting.proof_offset <= memory.size() - greeting.proof.size() &&
         std::memcmp(memory.base() + greeting.proof_offset, greeting.proof.data(),
                     greeting.proof.size()) == 0;
}

class Exploration {
 public:
  Exploration(const bootstrap::Rendezvous& rendezvous, PeerListener& listener,
              const std::shared_ptr<memory::SharedSegment>& segment, size_t chunk_bytes)
      : participant_(rendezvous.participant),
        members_(rendezvous.members),
        listener_(listener),
        segment_(segment),
        chunk_bytes_(chunk_bytes),
        machine_(on_machine_of(participant_.rank, members_)),
        found_(members_.size()) {}

  LocalPeers run() {
    const unsigned expected = find_expected();
    if ((expected & kAllKnown) != 0) return settle(machines());
    if ((expected & kAllCalled) != 0) {
      if (meet_all()) return settle(machines(), std::move(region_));
      return settle(partition(gather_mapped([this] { rethrow_problem(); })));
    }
    return settle(partition(gather_mapped([this] {
      if (machine_.size() > 1) meet_machine();
    })));
  }

 private:
  size_t self() const { return static_cast<size_t>(participant_.rank); }
  const bootstrap::Member& member(int rank) const { return members_[static_cast<size_t>(rank)]; }

  // Returns the node of each rank if each machine is one node.
  std::vector<int> machines() const {
    std::map<std::pair<std::string, std::string>, int> numbers;
    std::vector<int> node_of;
    for (const bootstrap::Member& each : members_) {
      const auto number = static_cast<int>(numbers.size());
      node_of.push_back(
          numbers.try_emplace({each.boot_id, each.forced_node}, number).first->second);
    }
    return node_of;
  }

  // Runs `meet`, and publishes the ranks that this rank has mapped, or the error of `meet`. Returns
  // the lists of all ranks.
  std::vector<std::string> gather_mapped(const std::function<void()>& meet) {
    return gather(participant_, "neighbours", bootstrap::everyone(participant_.size), [&] {
      meet();
      return mapped_by_this();
    });
  }

  // `region`: this rank's region, if all ranks of its node have exchanged their regions.
  LocalPeers settle(std::vector<int> node_of, std::shared_ptr<GroupRegion> region = nullptr) {
    own_.reset();  // all ranks have read the proof
    LocalPeers all{std::move(node_of), std::move(found_), std::move(region), std::move(regions_)};
    warn_of_strangers(all.node_of);
    for (size_t r = 0; r < all.at.size(); ++r) {
      if (all.node_of[r] != all.node_of[self()]) all.at[r].reset();
      if (all.at[r]) remember_local_peer(local_peer_key(members_[r]), all.at[r]);
    }
    return all;
  }

  // Calls the higher ranks of this machine if no other rank of the machine is known. Returns the
  // facts that are true on all ranks.
  unsigned find_expected() {
    unsigned facts = kAllKnown | kAllCalled;
    for (const int rank : machine_) {
      if (rank == participant_.rank) continue;
      const auto r = static_cast<size_t>(rank);
      found_[r] = known_local_peer(local_peer_key(members_[r]));
      facts &= found_[r] ? ~kAllCalled : ~kAllKnown;
    }
    if (machine_.size() > 1 && facts == kAllCalled && !call_all()) facts = 0;
    const auto common = vouch(participant_, bootstrap::kFirstCount, facts);
    if (problem_) return 0;
    return common ? *common : held_by_all(participant_, bootstrap::kFirstCount);
  }

  bool call_all() {
    if (differ_in_network()) return false;
    try {
      own_ = prepare(segment_, member(participant_.rank));
      region_ = std::make_shared<GroupRegion>(segment_, machine_.size(), chunk_bytes_);
      return std::ranges::all_of(machine_, [this](int rank) {
        return rank <= participant_.rank || call(rank) == kCalled;
      });
    } catch (const std::exception&) {
      problem_ = std::current_exception();
      return false;
    }
  }

  // Exchanges descriptors with all ranks of this machine, which have called one another. Returns
  // true if all ranks of the group have mapped the segments of their machine.
  bool meet_all() {
    std::map<std::string, int> peers;
    for (const int rank : machine_) {
      if (rank != participant_.rank) peers.emplace(local_peer_key(member(rank)), rank);
    }
    try {
      if (!peers.empty()) exchange_with(peers);
    } catch (const Error& error) {
      // The other ranks notice these errors themselves.
      if (error.kind() == ErrorKind::kDeath || error.kind() == ErrorKind::kTimeout) throw;
      problem_ = std::current_exception();
    }
    const bool mapped = std::ranges::all_of(peers, [this](const auto& peer) {
      return found_[static_cast<size_t>(peer.second)] != nullptr;
    });
    const auto common = vouch(participant_, "mapped", mapped ? kAllMapped : 0);
    const bool all_mapped =
        !problem_ && (common ? *common : held_by_all(participant_, "mapped")) == kAllMapped;
    if (!all_mapped && region_) region_->disown();  // join() then publishes another region
    return all_mapped;
  }

  void exchange_with(const std::map<std::string, int>& peers) {
    regions_.assign(members_.size(), 0);
    regions_[self()] = own_->introduction.greeting.region_offset = region_->publish();
    for (auto& [rank, other] :
         exchange(participant_, own_->introduction, std::move(called_), listener_, peers)) {
      const auto r = static_cast<size_t>(rank);
      regions_[r] = other.greeting.region_offset;
      found_[r] = map(rank, std::move(other));
    }
  }

  void rethrow_problem() const {
    if (problem_) std::rethrow_exception(problem_);
  }

  void meet_machine() {
    if (differ_in_network()) {
      gather(participant_, "listeners", machine_, [this] {
        listener_.open_to_other_networks();
        return std::string();
      });
    }
    call_the_unknown();
    listener_.close_to_other_networks();  // all ranks have called
    std::map<std::string, int> peers;
    for (const int rank : machine_) {
      const auto lower = static_cast<size_t>(std::min(rank, participant_.rank));
      const auto higher = static_cast<size_t>(std::max(rank, participant_.rank));
      if (calls_[lower][higher] == kCalled) peers.emplace(local_peer_key(member(rank)), rank);
    }
    if (peers.empty()) return;
    for (auto& [rank, other] :
         exchange(participant_, own_->introduction, std::move(called_), listener_, peers)) {
      found_[static_cast<size_t>(rank)] = map(rank, std::move(other));
    }
  }

  bool differ_in_network() const {
    return std::any_of(machine_.begin(), machine_.end(), [this](int rank) {
      return member(rank).network_namespace != member(machine_.front()).network_namespace;
    });
  }

  // The lower rank of each pair calls the higher rank, except if each knows the other as a local
  // peer. A rank forgets a local peer that none of its groups uses any more. If only one of two
  // ranks has forgotten the other, a second round follows, in which the other rank forgets too. In
  // that round the lower rank calls, unless it called in the first round.
  void call_the_unknown() {
    std::string mine(members_.size(), kNothing);
    for (const auto& [rank, socket] : called_) mine[static_cast<size_t>(rank)] = kCalled;
    for (size_t r = 0; r < found_.size(); ++r) {
      if (found_[r]) mine[r] = kKnown;
    }
    for (int round = 1; round == 1 || one_sided(); ++round) {
      calls_ = gather(participant_, "calls" + std::to_string(round), machine_, [&] {
        rethrow_problem();
        for (const int rank : machine_) {
          const auto r = static_cast<size_t>(rank);
          if (round > 1 && calls_[r][self()] != kKnown) found_[r].reset();
          if (rank == participant_.rank || found_[r]) continue;
          if (!own_) own_ = prepare(segment_, member(participant_.rank));
          if (mine[r] != kCalled) mine[r] = call(rank);
        }
        return mine;
      });
    }
  }

  char call(int rank) {
    if (rank < participant_.rank) return kNothing;
    Descriptor called = PeerListener::call(member(participant_.rank), member(rank));
    if (!called) return kNothing;
    called_[rank] = std::move(called);
    return kCalled;
  }

  bool one_sided() const {
    for (const int a : machine_) {
      for (const int b : machine_) {
        const auto one = static_cast<size_t>(a);
        const auto other = static_cast<size_t>(b);
        if (calls_[one][other] == kKnown && calls_[other][one] != kKnown) return true;
      }
    }
    return false;
  }

  std::shared_ptr<const LocalPeer> map(int rank, Introduction other) const {
    std::string reason = "it does not hold what its owner wrote";
    try {
      auto memory = memory::map_segment(other.memory.get());
      if (holds(*memory, other.greeting)) {
        return std::make_shared<const LocalPeer>(
            LocalPeer{std::move(memory), std::move(other.pidfd), member(rank).pid});
      }
    } catch (const Error& error) {
      reason = error.what();
    }
    log::warn("the segment of rank " + std::to_string(rank) + " of " + participant_.group +
              " cannot be shared, so it counts as on another node: " + reason);
    return nullptr;
  }

  // On the first rank of a machine, warns if another rank of the machine does not share its memory.
  // Warns once in a process, because later groups have the same ranks.
  void warn_of_strangers(const std::vector<int>& node_of) const {
    if (participant_.rank != machine_.front()) return;
    const auto stranger = std::find_if(machine_.begin(), machine_.end(), [&](int rank) {
      return node_of[static_cast<size_t>(rank)] != node_of[self()];
    });
    static std::atomic<bool> warned{false};
    if (stranger == machine_.end() || warned.exchange(true)) return;
    log::warn("ranks " + std::to_string(participant_.rank) + " and " + std::to_string(*stranger) +
              " of " + participant_.group + " run on one machine (" +
              member(participant_.rank).host +
              ") and do not share memory: they count as on different nodes, and MPI carries what "
              "shared memory could. Give their containers one network or one directory "
              "(HBMCOMM_SOCKET_DIR) and one user; HBMCOMM_LOG=info tells what failed; different "
              "values of HBMCOMM_NODE_ID say that it is meant");
  }

  std::string mapped_by_this() const {
    std::string mapped;
    for (const auto& local_peer : found_) mapped += local_peer ? '1' : '0';
    return mapped;
  }

  const bootstrap::Participant& participant_;
  const std::vector<bootstrap::Member>& members_;
  PeerListener& listener_;
  const std::shared_ptr<memory::SharedSegment>& segment_;
  const size_t chunk_bytes_;
  const std::vector<int> machine_;                       // ranks on this machine, this one included
  std::vector<std::shared_ptr<const LocalPeer>> found_;  // by rank
  std::vector<std::string> calls_;                       // by rank: its states towards all ranks
  std::map<int, Descriptor> called_;
  std::vector<uint64_t> regions_;         // by rank: offset of its control region
  std::optional<Own> own_;                // set once this rank must introduce itself to another
  std::shared_ptr<GroupRegion> region_;   // this rank's region, for all ranks of this machine
  std::exception_ptr problem_ = nullptr;  // why this rank cannot continue
};

// The local peers that this process knows, for all its groups.
struct Cache {
  std::mutex mutex;  // guards `local_peers`
  std::map<std::string, std::weak_ptr<const LocalPeer>> local_peers;
};

}  // namespace

LocalPeers apart(int size) {
  return {bootstrap::everyone(size),
          std::vector<std::shared_ptr<const LocalPeer>>(static_cast<size_t>(size))};
}

LocalPeers explore(const bootstrap::Rendezvous& rendezvous, PeerListener& listener,
                   const std::shared_ptr<memory::SharedSegment>& segment, size_t chunk_bytes) {
  return Exploration(rendezvous, listener, segment, chunk_bytes).run();
}

std::vector<int> partition(const std::vector<std::string>& mapped) {
  std::vector<std::vector<size_t>> nodes;
  std::vector<int> node_of;
  for (size_t rank = 0; rank < mapped.size(); ++rank) {
    const auto fits = [&](const std::vector<size_t>& node) {
      return std::all_of(node.begin(), node.end(), [&](size_t other) {
        return mapped[rank][other] == '1' && mapped[other][rank] == '1';
      });
    };
    const auto found = std::find_if(nodes.begin(), nodes.end(), fits);
    node_of.push_back(static_cast<int>(found - nodes.begin()));
    if (found == nodes.end()) {
      nodes.push_back({rank});
    } else {
      found->push_back(rank);
    }
  }
  return node_of;
}

std::string local_peer_key(const bootstrap::Member& member) {
  return member.process + "." + member.segment;
}

std::shared_ptr<const LocalPeer> known_local_peer(const std::string& key) {
  auto& cache = per_process<Cache>();
  const std::lock_guard lock(cache.mutex);
  const auto found = cache.local_peers.find(key);
  return found == cache.local_peers.end() ? nullptr : found->second.lock();
}

void remember_local_peer(const std::string& key,
                         const std::shared_ptr<const LocalPeer>& local_peer) {
  auto& cache = per_process<Cache>();
  const std::lock_guard lock(cache.mutex);
  std::erase_if(cache.local_peers, [](const auto& entry) { return entry.second.expired(); });
  cache.local_peers[key] = local_peer;
}

}  // namespace hbm::communicator::shm
