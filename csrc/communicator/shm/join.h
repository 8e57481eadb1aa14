// Makes the ShmGroup of the ranks on this node from the result of explore() (local_peers.h).
//
// Threads: the thread that forms the group.
#pragma once

#include <cstddef>
#include <memory>

#include "bootstrap/rendezvous.h"
#include "communicator/shm/local_peers.h"
#include "communicator/shm/shm_group.h"
#include "memory/segment.h"

namespace hbm::communicator::shm {

// Publishes a control region in `segment` to the local peers, unless explore() has published one,
// and returns the group of this node. All ranks of the rendezvous call it, after explore().
// `chunk_bytes`: the bytes that an operation stages at a time, as in explore(). `threads`: the
// threads that share a large reduction or copy of this rank.
//
// An error of one rank of the node reaches the others as in bootstrap::gather(). Throws
// Error(kExhausted) if the segment has no room for the region.
std::shared_ptr<ShmGroup> join(const bootstrap::Rendezvous& rendezvous,
                               std::shared_ptr<memory::SharedSegment> segment,
                               const LocalPeers& local_peers, size_t chunk_bytes,
                               bool oversubscribed, size_t threads);

}  // namespace hbm::communicator::shm
