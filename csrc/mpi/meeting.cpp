#include "mpi/meeting.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "base/error.h"

namespace hbm::mpi {
namespace {

std::string encode(const Member& member) {
  std::string problem = member.problem;
  std::replace(problem.begin(), problem.end(), '\n', ' ');
  std::ostringstream text;
  text << member.version << '\n'
       << member.host << '\n'
       << member.pid << '\n'
       << member.node << '\n'
       << member.chunk_bytes << '\n'
       << problem << '\n'
       << member.world_id << '\n'
       << member.world_rank << '\n'
       << member.world_size << '\n';
  return text.str();
}

Member decode(const std::string& text) {
  std::istringstream lines(text);
  const auto line = [&lines] {
    std::string value;
    std::getline(lines, value);
    return value;
  };
  Member member;
  member.version = line();
  member.host = line();
  member.pid = std::stol(line());
  member.node = line();
  member.chunk_bytes = line();
  member.problem = line();
  member.world_id = line();
  member.world_rank = std::stoi(line());
  member.world_size = std::stoi(line());
  return member;
}

std::string random_id() {
  std::random_device device;
  std::ostringstream text;
  text << "hbm" << std::hex << device() << device();
  return text.str();
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void require_equal(const std::vector<Member>& members, std::string Member::* field,
                   const std::string& what, const std::string& group) {
  for (size_t r = 1; r < members.size(); ++r) {
    if (members[r].*field == members[0].*field) continue;
    throw Error(ErrorKind::kMismatch, what + " differs in " + group + ": rank 0 has " +
                                          members[0].*field + ", rank " + std::to_string(r) +
                                          " has " + members[r].*field +
                                          "; it must be the same on every rank");
  }
}

[[noreturn]] void no_common_world(const std::vector<Member>& members, const std::string& group) {
  std::string found;
  for (size_t r = 0; r < members.size(); ++r) {
    const Member& member = members[r];
    found += "\n  rank " + std::to_string(r) + ": ";
    found += member.world_rank < 0 ? "no MPI yet"
                                   : "rank " + std::to_string(member.world_rank) +
                                         " of a world of " + std::to_string(member.world_size);
  }
  throw Error(ErrorKind::kUnavailable,
              "the ranks of " + group +
                  " do not share an MPI world, and MPI can be initialised only once in a "
                  "process:" +
                  found +
                  "\nMake an hbm group of all ranks first (smaller groups are then cut from it); "
                  "import mpi4py after it; or start with mpiexec or srun and "
                  "init_method=\"mpi://\".");
}

// True if all members are in one world that exists; false if none has a world.
bool share_a_world(const std::vector<Member>& members, const std::string& group) {
  const Member& first = members.front();
  std::set<int> world_ranks;
  for (const Member& member : members) {
    if (member.world_id != first.world_id || member.world_size != first.world_size ||
        (member.world_rank < 0) != (first.world_rank < 0)) {
      no_common_world(members, group);
    }
    world_ranks.insert(member.world_rank);
  }
  if (first.world_rank < 0) return false;
  if (world_ranks.size() != members.size()) no_common_world(members, group);
  return true;
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

Member introduce(const std::string& version, size_t chunk_bytes, bool needs_mpi) {
  Member self;
  self.version = version;
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  self.host = host.data();
  self.pid = getpid();
  self.node = node_key();
  self.chunk_bytes = std::to_string(chunk_bytes);
  if (!needs_mpi) return self;
  try {
    library();
    if (const World* world = World::current()) {
      self.world_id = world->id();
      self.world_rank = world->rank();
      self.world_size = world->size();
    }
  } catch (const Error& error) {
    self.problem = error.what();
  }
  return self;
}

Meeting meet(KeyValue& store, const Member& self, int rank, int size, const std::string& group,
             Deadline deadline) {
  // A store may outlive a group (torchrun's agent keeps one for the whole job), so each rank counts
  // its own meetings here: the n-th of one rank meets the n-th of the others.
  const std::string counter = "hbm/meetings/" + std::to_string(rank);
  const std::string prefix = "hbm/meeting" + std::to_string(store.add(counter, 1)) + "/";
  store.set(prefix + std::to_string(rank), encode(self));

  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(prefix + std::to_string(r));
  if (!store.wait(keys, deadline)) {
    std::vector<int> absent;
    for (int r = 0; r < size; ++r) {
      if (!store.get(keys[static_cast<size_t>(r)])) absent.push_back(r);
    }
    throw Error(ErrorKind::kTimeout,
                "rank " + std::to_string(rank) + " of " + group + " met " +
                    std::to_string(size - static_cast<int>(absent.size())) + " of " +
                    std::to_string(size) + " ranks before the timeout; missing ranks: " +
                    list(absent) + ". Did they start, and with the same world size?");
  }
  std::vector<Member> members;
  for (const std::string& key : keys) members.push_back(decode(store.get(key).value()));
  for (int r = 0; r < size; ++r) {
    const std::string& problem = members[static_cast<size_t>(r)].problem;
    if (problem.empty()) continue;
    throw Error(ErrorKind::kUnavailable,
                "rank " + std::to_string(r) + " of " + group + " cannot take part: " + problem);
  }
  require_equal(members, &Member::version, "the version of torch_hbmcomm", group);
  require_equal(members, &Member::chunk_bytes, "the staging chunk (from staging_bytes)", group);
  return {members, prefix};
}

std::vector<int> nodes_of(const std::vector<Member>& members) {
  std::map<std::string, int> numbers;
  std::vector<int> node_of;
  for (const Member& member : members) {
    node_of.push_back(
        numbers.try_emplace(member.node, static_cast<int>(numbers.size())).first->second);
  }
  return node_of;
}

std::shared_ptr<Communicator> connect(std::shared_ptr<KeyValue> store,
                                      const std::vector<Member>& members, int rank,
                                      const std::string& group, Deadline deadline) {
  const int size = static_cast<int>(members.size());
  std::vector<int> world_ranks;
  World* world = World::current();
  if (share_a_world(members, group)) {
    for (const Member& member : members) world_ranks.push_back(member.world_rank);
  } else {
    const std::string key = "hbm/world/" + members[0].host + "/" + std::to_string(members[0].pid);
    if (rank == 0) store->set(key, random_id());
    if (!store->wait({key}, deadline)) {
      throw Error(ErrorKind::kTimeout,
                  "rank 0 of " + group + " did not name the MPI world in time");
    }
    world = &World::form(store, store->get(key).value(), rank, size, nodes_of(members), deadline);
    for (int r = 0; r < size; ++r) world_ranks.push_back(r);
  }
  const int tag = static_cast<int>(std::hash<std::string>{}(group) & 0x3fff);
  return world->communicator(world_ranks, tag, deadline);
}

}  // namespace hbm::mpi
