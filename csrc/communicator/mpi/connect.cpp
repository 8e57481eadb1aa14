#include "communicator/mpi/connect.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iomanip>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "base/boot_id.h"
#include "base/error.h"
#include "base/log.h"
#include "bootstrap/claim.h"
#include "bootstrap/rendezvous.h"
#include "communicator/group_names.h"
#include "communicator/mpi/environment.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/world.h"
#include "communicator/tcp/connect.h"

namespace hbm::communicator::mpi {
namespace {

uint64_t random_number() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

// Does not load MPI: a newcomer to ranks that have a world needs none.
MpiState own_state(const bootstrap::Participant& participant, const std::vector<int>& node_of) {
  MpiState own;
  own.node = node_key();
  if (!node_of.empty()) {
    own.node += "/" + std::to_string(node_of[static_cast<size_t>(participant.rank)]);
  }
  own.new_world = "hbm" + bootstrap::random_id();
  own.sharing = own_sharing_facts();
  own.risks = risky_variables();
  own.group_number = random_number();
  if (const World* world = World::current()) {
    own.world_id = world->id();
    own.world_rank = world->rank();
    own.world_size = world->size();
  }
  return own;
}

// Returns a tag that distinguishes concurrent creations of communicators.
int creation_tag(const bootstrap::Participant& participant) {
  return static_cast<int>(std::hash<std::string>{}(participant.group) & 0x3fff);
}

// Returns the ranks' worlds for the log, as in "rank 0: rank 1 of a world of 2, rank 1: no MPI".
std::string describe_worlds(const std::vector<MpiState>& ranks) {
  std::string text;
  for (size_t r = 0; r < ranks.size(); ++r) {
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(r) + ": ";
    text += ranks[r].world_rank < 0 ? "no MPI"
                                    : "rank " + std::to_string(ranks[r].world_rank) +
                                          " of a world of " + std::to_string(ranks[r].world_size);
  }
  return text;
}

MpiConnection connect_by_links(const bootstrap::Rendezvous& rendezvous,
                               const std::vector<MpiState>& ranks) {
  const bootstrap::Participant& participant = rendezvous.participant;
  log::info(participant.group +
            " uses TCP links, because its ranks share no MPI world: " + describe_worlds(ranks));
  const uint64_t group_number = ranks.front().group_number;
  const std::shared_ptr<tcp::Links> links = tcp::connect(rendezvous, group_number);
  const CommHandle all = links->communicator(bootstrap::everyone(participant.size));
  return {std::make_shared<Comm>(links, all),
          {},
          links,
          group_number,
          std::make_shared<Arrivals>(links->poll()),
          /*wakes=*/true};
}

// Ensures, on every rank, that MPI_Init will neither end the process nor print errors. Loads MPI,
// checks the preconditions, and excludes shared memory of UCX that a rank could not open.
void require_preconditions(const bootstrap::Participant& participant,
                           const std::vector<MpiState>& ranks) {
  std::vector<SharingFacts> facts;
  for (const MpiState& rank : ranks) facts.push_back(rank.sharing);
  require_one_user(facts, participant.group);
  set_transport_defaults(!is_shut_out(facts, participant.rank));
  gather(participant, "shared-memory", bootstrap::everyone(participant.size), [&] {
    library();
    require_start(ranks.size(), sharing_shm_directory(facts, participant.rank));
    return std::string();
  });
}

}  // namespace

std::string encode(const MpiState& state) {
  std::ostringstream text;
  text << std::quoted(state.node) << ' ' << std::quoted(state.new_world) << ' '
       << std::quoted(state.world_id) << ' ' << state.world_rank << ' ' << state.world_size << ' '
       << state.sharing.user << ' ' << std::quoted(state.sharing.boot_id) << ' '
       << std::quoted(state.sharing.namespaces) << ' ' << std::quoted(state.sharing.shm_directory)
       << ' ' << std::quoted(state.sharing.access) << ' ' << state.sharing.shares << ' '
       << std::quoted(state.risks) << ' ' << state.group_number;
  return text.str();
}

MpiState decode(const std::string& record) {
  std::istringstream text(record);
  MpiState state;
  text >> std::quoted(state.node) >> std::quoted(state.new_world) >> std::quoted(state.world_id) >>
      state.world_rank >> state.world_size >> state.sharing.user >>
      std::quoted(state.sharing.boot_id) >> std::quoted(state.sharing.namespaces) >>
      std::quoted(state.sharing.shm_directory) >> std::quoted(state.sharing.access) >>
      state.sharing.shares >> std::quoted(state.risks) >> state.group_number;
  return state;
}

CommonWorld common_world(const std::vector<MpiState>& ranks) {
  const MpiState& first = ranks.front();
  std::set<int> world_ranks;
  for (const MpiState& rank : ranks) {
    if (rank.world_id != first.world_id || rank.world_size != first.world_size ||
        (rank.world_rank < 0) != (first.world_rank < 0)) {
      return CommonWorld::kApart;
    }
    world_ranks.insert(rank.world_rank);
  }
  if (first.world_rank < 0) return CommonWorld::kNone;
  return world_ranks.size() == ranks.size() ? CommonWorld::kOne : CommonWorld::kApart;
}

bool nodes_share_memory(const std::vector<MpiState>& ranks, const std::vector<int>& node_of,
                        size_t rank) {
  const SharingFacts& own = ranks[rank].sharing;
  for (size_t other = 0; other < ranks.size(); ++other) {
    const SharingFacts& its = ranks[other].sharing;
    if (node_of[other] == node_of[rank] || its.boot_id != own.boot_id) continue;
    if (own.shares || its.shares) return true;
  }
  return false;
}

std::vector<int> nodes_of(const std::vector<MpiState>& ranks) {
  std::map<std::string, int> numbers;
  std::vector<int> node_of;
  for (const MpiState& rank : ranks) {
    node_of.push_back(
        numbers.try_emplace(rank.node, static_cast<int>(numbers.size())).first->second);
  }
  return node_of;
}

std::string risks_of(const std::vector<MpiState>& ranks) {
  const std::string& first = ranks.front().risks;
  const auto has_first = [&](const MpiState& rank) { return rank.risks == first; };
  if (std::all_of(ranks.begin(), ranks.end(), has_first)) return first;
  std::string text;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].risks.empty()) continue;
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(r) + ": " + ranks[r].risks;
  }
  return text;
}

std::string node_key() {
  std::string key = boot_id();
  for (const char* shared : {"/dev/shm", "/proc/self/ns/pid", "/proc/self/ns/user"}) {
    struct stat found{};
    stat(shared, &found);  // zeros if it does not exist
    key += "/" + std::to_string(found.st_dev) + ":" + std::to_string(found.st_ino);
  }
  key += "/" + std::to_string(geteuid());
  const char* forced = std::getenv("HBMCOMM_NODE_ID");
  return key + "/" + (forced != nullptr ? forced : "");
}

MpiConnection connect(const bootstrap::Rendezvous& rendezvous, const std::vector<int>& node_of) {
  const bootstrap::Participant& participant = rendezvous.participant;
  std::vector<MpiState> ranks;
  for (const std::string& record :
       gather(participant, "mpi", bootstrap::everyone(participant.size),
              [&] { return encode(own_state(participant, node_of)); })) {
    ranks.push_back(decode(record));
  }
  const std::vector<int> everyone = bootstrap::everyone(participant.size);
  bootstrap::AbortWatcher aborts(participant, everyone);
  const auto check = [&] { aborts.check(); };
  require_not_aborted(participant, participant.deadline);
  const uint64_t group_number = ranks.front().group_number;
  name_group(group_number, participant.group);
  const CommonWorld common = common_world(ranks);
  if (common == CommonWorld::kApart) return connect_by_links(rendezvous, ranks);
  std::vector<int> world_ranks;
  World* world = nullptr;
  if (common == CommonWorld::kOne) {
    world = World::current();
    for (const MpiState& rank : ranks) world_ranks.push_back(rank.world_rank);
  } else {
    require_preconditions(participant, ranks);
    world = &World::form(participant.store, ranks[0].new_world, participant.rank, participant.size,
                         nodes_of(ranks), participant.deadline, check, risks_of(ranks));
    world_ranks = everyone;
  }
  const bool wakes = world->arrivals() && !node_of.empty() &&
                     !nodes_share_memory(ranks, node_of, static_cast<size_t>(participant.rank));
  return {world->communicator(world_ranks, creation_tag(participant), participant.deadline, check),
          world_ranks,
          nullptr,
          group_number,
          world->arrivals(),
          wakes};
}

std::shared_ptr<Comm> connect_some(const bootstrap::Rendezvous& rendezvous,
                                   const MpiConnection& group, const std::vector<int>& ranks) {
  if (group.links) return std::make_shared<Comm>(group.links, group.links->communicator(ranks));
  std::vector<int> world_ranks;
  for (const int rank : ranks) {
    world_ranks.push_back(group.world_ranks[static_cast<size_t>(rank)]);
  }
  bootstrap::AbortWatcher aborts(rendezvous.participant, ranks);
  return World::current()->communicator(world_ranks, creation_tag(rendezvous.participant),
                                        rendezvous.participant.deadline, [&] { aborts.check(); });
}

}  // namespace hbm::communicator::mpi
