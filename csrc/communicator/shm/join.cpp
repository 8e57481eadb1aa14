#include "communicator/shm/join.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"

namespace hbm::cluster {
namespace {

// A block of the segment that neighbours may still look at when its team is gone.
struct OldArea {
  std::shared_ptr<memory::Segment> segment;
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
      if (!node::Team::released(area.block, area.members)) return false;
      area.segment->free(area.block);
      return true;
    });
  }

 private:
  const ForkGuard fork_;
  std::mutex mutex_;
  std::vector<OldArea> areas_;  // guarded by mutex_
};

// What a team stands on: its own area, and the neighbours' memory.
struct Ground {
  OldArea own;
  std::vector<std::shared_ptr<const node::Neighbour>> neighbours;

  Ground(OldArea area, std::vector<std::shared_ptr<const node::Neighbour>> at)
      : own(std::move(area)), neighbours(std::move(at)) {}
  ~Ground() {
    OldAreas::all().add(std::move(own));
    OldAreas::all().sweep();
  }
};

}  // namespace

std::shared_ptr<node::Team> join(const bootstrap::Meeting& meeting,
                                 std::shared_ptr<memory::Segment> segment,
                                 const node::Neighbourhood& neighbourhood, size_t chunk_bytes,
                                 bool crowded) {
  OldAreas::all().sweep();
  const auto own = static_cast<size_t>(meeting.party.rank);
  std::vector<int> local;
  for (int rank = 0; rank < meeting.party.size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (neighbourhood.node_of[r] == neighbourhood.node_of[own]) local.push_back(rank);
  }

  const node::AreaLayout layout(local.size(), chunk_bytes);
  std::byte* area = nullptr;
  const auto offsets = bootstrap::gather(meeting.party, "areas", local, [&] {
    area = static_cast<std::byte*>(segment->allocate(layout.total));
    node::format_area(area, layout);
    return std::to_string(segment->offset_of(area));
  });

  node::Team::Setup setup;
  setup.group = meeting.party.group;
  setup.chunk_bytes = chunk_bytes;
  setup.crowded = crowded;
  for (const int rank : local) {
    const auto r = static_cast<size_t>(rank);
    const bootstrap::Member& member = meeting.members[r];
    if (r == own) setup.self = setup.members.size();
    const auto& neighbour = neighbourhood.at[r];
    setup.members.push_back({rank,
                             "rank " + std::to_string(rank) + " (pid " +
                                 std::to_string(member.pid) + " on " + member.host + ")",
                             r == own ? segment->base() : neighbour->memory->base(),
                             r == own ? segment->size() : neighbour->memory->size(),
                             std::stoull(offsets[r]), r == own ? -1 : neighbour->pidfd.get()});
  }
  setup.keep = std::make_shared<Ground>(OldArea{segment, area, local.size()}, neighbourhood.at);
  setup.allocate = [segment](size_t bytes) {
    return static_cast<std::byte*>(segment->allocate(bytes));
  };
  setup.free = [segment](std::byte* block) { segment->free(block); };
  return std::make_shared<node::Team>(std::move(setup));
}

}  // namespace hbm::cluster
