// Makes a ShmGroup of the ranks that share this node, out of neighbours and segments.
#pragma once

#include <cstddef>
#include <memory>

#include "bootstrap/rendezvous.h"
#include "communicator/shm/neighbours.h"
#include "communicator/shm/shm_group.h"
#include "memory/segment.h"

namespace hbm::shm {

// Lays out an area in `segment`, unless exploring has, tells the neighbours where, and joins them.
// All ranks of the rendezvous call it, having explored. `chunk_bytes` is what an operation stages
// at a time, the same as when exploring; `threads` share a large one's work.
//
// What fails on one rank of the node reaches the others as in bootstrap::gather(); throws
// Error(kExhausted) when there is no room for the area.
std::shared_ptr<ShmGroup> join(const bootstrap::Rendezvous& rendezvous,
                               std::shared_ptr<memory::SharedSegment> segment,
                               const Neighbourhood& neighbourhood, size_t chunk_bytes, bool crowded,
                               size_t threads);

}  // namespace hbm::shm
