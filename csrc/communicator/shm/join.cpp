#include "communicator/shm/join.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"

namespace hbm::shm {
namespace {

// A block of the segment that neighbours may still look at when its group is gone.
struct OldArea {
  std::shared_ptr<memory::SharedSegment> segment;
  std::byte* block;
  size_t members;
};

class OldAreas {
 public:
  static OldAreas& all() {
    static auto* const areas = new OldAreas;
    return *areas;
  }

  void add(OldArea area) {
    if (fork_.in_child()) return;
    const std::lock_guard lock(mutex_);
    areas_.push_back(std::move(area));
  }

  // Gives back those that nobody looks at any more.
  void sweep() {
    if (fork_.in_child()) return;
    const std::lock_guard lock(mutex_);
    std::erase_if(areas_, [](const OldArea& area) {
      if (!ShmGroup::released(area.block, area.members)) return false;
      area.segment->free(area.block);
      return true;
    });
  }

 private:
  const ForkGuard fork_;
  std::mutex mutex_;
  std::vector<OldArea> areas_;  // guarded by mutex_
};

// The memory under a ShmGroup: its own area, and the neighbours' segments.
struct Ground {
  OldArea own;
  std::vector<std::shared_ptr<const Neighbour>> neighbours;

  Ground(OldArea area, std::vector<std::shared_ptr<const Neighbour>> at)
      : own(std::move(area)), neighbours(std::move(at)) {}
  ~Ground() {
    OldAreas::all().add(std::move(own));
    OldAreas::all().sweep();
  }
};

}  // namespace

std::shared_ptr<ShmGroup> join(const bootstrap::Rendezvous& rendezvous,
                               std::shared_ptr<memory::SharedSegment> segment,
                               const Neighbourhood& neighbourhood, size_t chunk_bytes, bool crowded,
                               size_t threads) {
  OldAreas::all().sweep();
  const auto own = static_cast<size_t>(rendezvous.participant.rank);
  std::vector<int> local;
  for (int rank = 0; rank < rendezvous.participant.size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (neighbourhood.node_of[r] == neighbourhood.node_of[own]) local.push_back(rank);
  }

  const AreaLayout layout(local.size(), chunk_bytes);
  std::byte* area = nullptr;
  const auto offsets = bootstrap::gather(rendezvous.participant, "areas", local, [&] {
    area = static_cast<std::byte*>(segment->allocate(layout.total));
    format_area(area, layout);
    return std::to_string(segment->offset_of(area));
  });

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
                             std::stoull(offsets[r]), r == own ? -1 : neighbour->pidfd.get()});
  }
  setup.keep = std::make_shared<Ground>(OldArea{segment, area, local.size()}, neighbourhood.at);
  setup.allocate = [segment](size_t bytes) {
    return static_cast<std::byte*>(segment->allocate(bytes));
  };
  setup.free = [segment](std::byte* block) { segment->free(block); };
  return std::make_shared<ShmGroup>(std::move(setup));
}

}  // namespace hbm::shm
