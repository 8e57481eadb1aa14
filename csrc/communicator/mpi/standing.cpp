#include "communicator/mpi/standing.h"

#include <iomanip>
#include <map>
#include <set>
#include <sstream>

#include "base/error.h"

namespace hbm::mpi {
namespace {

[[noreturn]] void no_common_world(const std::vector<MpiState>& ranks, const std::string& group) {
  std::string found;
  for (size_t r = 0; r < ranks.size(); ++r) {
    found += "\n  rank " + std::to_string(r) + ": ";
    found += ranks[r].world_rank < 0 ? "no MPI yet"
                                     : "rank " + std::to_string(ranks[r].world_rank) +
                                           " of a world of " + std::to_string(ranks[r].world_size);
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

}  // namespace

std::string encode(const MpiState& standing) {
  std::ostringstream text;
  text << std::quoted(standing.node) << ' ' << std::quoted(standing.new_world) << ' '
       << std::quoted(standing.world_id) << ' ' << standing.world_rank << ' '
       << standing.world_size;
  return text.str();
}

MpiState decode(const std::string& record) {
  std::istringstream text(record);
  MpiState standing;
  text >> std::quoted(standing.node) >> std::quoted(standing.new_world) >>
      std::quoted(standing.world_id) >> standing.world_rank >> standing.world_size;
  return standing;
}

bool share_a_world(const std::vector<MpiState>& ranks, const std::string& group) {
  const MpiState& first = ranks.front();
  std::set<int> world_ranks;
  for (const MpiState& rank : ranks) {
    if (rank.world_id != first.world_id || rank.world_size != first.world_size ||
        (rank.world_rank < 0) != (first.world_rank < 0)) {
      no_common_world(ranks, group);
    }
    world_ranks.insert(rank.world_rank);
  }
  if (first.world_rank < 0) return false;
  if (world_ranks.size() != ranks.size()) no_common_world(ranks, group);
  return true;
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

}  // namespace hbm::mpi
