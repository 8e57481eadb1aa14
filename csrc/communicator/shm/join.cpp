#include "communicator/shm/join.h"

#include <string>
#include <utility>
#include <vector>

namespace hbm::shm {
namespace {

// The memory under a ShmGroup: its own area, and the neighbours' segments.
struct Ground {
  std::shared_ptr<GroupArea> own;
  std::vector<std::shared_ptr<const Neighbour>> neighbours;
};

// Where the areas of this node's ranks are, and this rank's own.
struct Areas {
  std::vector<uint64_t> offsets;  // by rank in the group
  std::shared_ptr<GroupArea> own;
};

Areas exchange_areas(const bootstrap::Rendezvous& rendezvous,
                     const std::shared_ptr<memory::SharedSegment>& segment,
                     const std::vector<int>& local, size_t chunk_bytes) {
  Areas areas;
  for (const std::string& told : gather(rendezvous.participant, "areas", local, [&] {
         areas.own = std::make_shared<GroupArea>(segment, local.size(), chunk_bytes);
         return std::to_string(areas.own->tell());
       })) {
    areas.offsets.push_back(told.empty() ? 0 : std::stoull(told));
  }
  return areas;
}

}  // namespace

std::shared_ptr<ShmGroup> join(const bootstrap::Rendezvous& rendezvous,
                               std::shared_ptr<memory::SharedSegment> segment,
                               const Neighbourhood& neighbourhood, size_t chunk_bytes, bool crowded,
                               size_t threads) {
  GroupArea::sweep();
  const auto own = static_cast<size_t>(rendezvous.participant.rank);
  std::vector<int> local;
  for (int rank = 0; rank < rendezvous.participant.size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (neighbourhood.node_of[r] == neighbourhood.node_of[own]) local.push_back(rank);
  }
  const Areas areas = neighbourhood.area ? Areas{neighbourhood.areas, neighbourhood.area}
                                         : exchange_areas(rendezvous, segment, local, chunk_bytes);

  ShmGroup::Setup setup;
  setup.group = rendezvous.participant.group;
  setup.chunk_bytes = chunk_bytes;
  setup.crowded = crowded;
  setup.threads = threads;
  for (const int rank : local) {
    const auto r = static_cast<size_t>(rank);
    const bootstrap::Member& member = rendezvous.members[r];
    if (r == own) setup.self = setup.members.size();
    const auto& neighbour = neighbourhood.at[r];
    setup.members.push_back({rank, "rank " + bootstrap::rank_name(rank, member),
                             r == own ? segment->base() : neighbour->memory->base(),
                             r == own ? segment->size() : neighbour->memory->size(),
                             areas.offsets[r], r == own ? -1 : neighbour->pidfd.get()});
  }
  setup.keep = std::make_shared<Ground>(Ground{areas.own, neighbourhood.at});
  setup.allocate = [segment](size_t bytes) {
    return static_cast<std::byte*>(segment->allocate_in_front(bytes));
  };
  setup.free = [segment](std::byte* block) { segment->free(block); };
  return std::make_shared<ShmGroup>(std::move(setup));
}

}  // namespace hbm::shm
