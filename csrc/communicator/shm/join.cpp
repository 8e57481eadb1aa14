#include "communicator/shm/join.h"

#include <string>
#include <utility>
#include <vector>

namespace hbm::communicator::shm {
namespace {

// The memory of a ShmGroup: this rank's region, and the segments of its local peers.
struct Ground {
  std::shared_ptr<GroupRegion> own;
  std::vector<std::shared_ptr<const LocalPeer>> local_peers;
};

// The control regions of this node's ranks.
struct Regions {
  std::vector<uint64_t> offsets;  // by rank in the group
  std::shared_ptr<GroupRegion> own;
};

Regions exchange_regions(const bootstrap::Rendezvous& rendezvous,
                         const std::shared_ptr<memory::SharedSegment>& segment,
                         const std::vector<int>& local, size_t chunk_bytes) {
  Regions regions;
  for (const std::string& published : gather(rendezvous.participant, "areas", local, [&] {
         regions.own = std::make_shared<GroupRegion>(segment, local.size(), chunk_bytes);
         return std::to_string(regions.own->publish());
       })) {
    regions.offsets.push_back(published.empty() ? 0 : std::stoull(published));
  }
  return regions;
}

}  // namespace

std::shared_ptr<ShmGroup> join(const bootstrap::Rendezvous& rendezvous,
                               std::shared_ptr<memory::SharedSegment> segment,
                               const LocalPeers& local_peers, size_t chunk_bytes,
                               bool oversubscribed, size_t threads) {
  GroupRegion::sweep();
  const auto own = static_cast<size_t>(rendezvous.participant.rank);
  std::vector<int> local;
  for (int rank = 0; rank < rendezvous.participant.size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (local_peers.node_of[r] == local_peers.node_of[own]) local.push_back(rank);
  }
  const Regions regions = local_peers.region
                              ? Regions{local_peers.regions, local_peers.region}
                              : exchange_regions(rendezvous, segment, local, chunk_bytes);

  ShmGroup::Setup setup;
  setup.group = rendezvous.participant.group;
  setup.chunk_bytes = chunk_bytes;
  setup.oversubscribed = oversubscribed;
  setup.threads = threads;
  for (const int rank : local) {
    const auto r = static_cast<size_t>(rank);
    const bootstrap::Member& member = rendezvous.members[r];
    if (r == own) setup.self = setup.local_ranks.size();
    const auto& local_peer = local_peers.at[r];
    setup.local_ranks.push_back({rank, "rank " + bootstrap::rank_name(rank, member),
                                 r == own ? segment->base() : local_peer->memory->base(),
                                 r == own ? segment->size() : local_peer->memory->size(),
                                 regions.offsets[r], r == own ? -1 : local_peer->pidfd.get()});
  }
  setup.keep = std::make_shared<Ground>(Ground{regions.own, local_peers.at});
  setup.allocate = [segment](size_t bytes) {
    return static_cast<std::byte*>(segment->allocate_reserved(bytes));
  };
  setup.free = [segment](std::byte* block) { segment->free(block); };
  return std::make_shared<ShmGroup>(std::move(setup));
}

}  // namespace hbm::communicator::shm
