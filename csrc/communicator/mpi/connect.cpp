#include "communicator/mpi/connect.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <functional>

#include "bootstrap/process_id.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/standing.h"
#include "communicator/mpi/world.h"

namespace hbm::mpi {
namespace {

Standing own_standing(const bootstrap::Party& party, const std::vector<int>& node_of) {
  library();
  Standing own;
  own.node = node_key();
  if (!node_of.empty()) {
    own.node += "/" + std::to_string(node_of[static_cast<size_t>(party.rank)]);
  }
  own.new_world = "hbm" + bootstrap::random_id();
  if (const World* world = World::current()) {
    own.world_id = world->id();
    own.world_rank = world->rank();
    own.world_size = world->size();
  }
  return own;
}

// Tells creations of communicators apart that run at the same time.
int creation_tag(const bootstrap::Party& party) {
  return static_cast<int>(std::hash<std::string>{}(party.group) & 0x3fff);
}

}  // namespace

std::string node_key() {
  std::string key;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> key;
  for (const char* shared : {"/dev/shm", "/proc/self/ns/pid", "/proc/self/ns/user"}) {
    struct stat found{};
    stat(shared, &found);  // zeros where there is none
    key += "/" + std::to_string(found.st_dev) + ":" + std::to_string(found.st_ino);
  }
  const char* forced = std::getenv("HBMCOMM_NODE_ID");
  return key + "/" + (forced != nullptr ? forced : "");
}

Connection connect(const bootstrap::Meeting& meeting, const std::vector<int>& node_of) {
  const bootstrap::Party& party = meeting.party;
  std::vector<Standing> ranks;
  for (const std::string& record : gather(party, "mpi", bootstrap::everyone(party.size),
                                          [&] { return encode(own_standing(party, node_of)); })) {
    ranks.push_back(decode(record));
  }
  std::vector<int> world_ranks;
  World* world = nullptr;
  if (share_a_world(ranks, party.group)) {
    world = World::current();
    for (const Standing& rank : ranks) world_ranks.push_back(rank.world_rank);
  } else {
    world = &World::form(party.store, ranks[0].new_world, party.rank, party.size, nodes_of(ranks),
                         party.deadline);
    world_ranks = bootstrap::everyone(party.size);
  }
  return {world->communicator(world_ranks, creation_tag(party), party.deadline), world_ranks};
}

std::shared_ptr<Communicator> connect_some(const bootstrap::Meeting& meeting,
                                           const Connection& group, const std::vector<int>& ranks) {
  std::vector<int> world_ranks;
  for (const int rank : ranks) {
    world_ranks.push_back(group.world_ranks[static_cast<size_t>(rank)]);
  }
  return World::current()->communicator(world_ranks, creation_tag(meeting.party),
                                        meeting.party.deadline);
}

}  // namespace hbm::mpi
