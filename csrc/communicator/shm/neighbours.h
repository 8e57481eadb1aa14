// Which ranks of a group share memory with this one: not by any name, but because each has mapped
// the other's segment and found there what its owner had written.
//
// Descriptors travel over Unix sockets, all steps in between through the store, with no thread and
// no wait that the rendezvous's deadline does not bound. What a process knows of another is kept as
// long as some group uses it, so a further group of the same ranks needs no sockets.
//
// The usual case takes a few keys of the store: no two ranks of a machine know each other, or all
// do, and all can share memory. Any other takes some for each rank.
//
// Threads: all functions may be called from any thread, also for several groups at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/shared_mapping.h"
#include "bootstrap/rendezvous.h"
#include "communicator/shm/group_area.h"
#include "communicator/shm/neighbour_listener.h"
#include "memory/segment.h"

namespace hbm::shm {

// Another process on this node.
struct Neighbour {
  std::shared_ptr<SharedMapping> memory;  // its segment
  Descriptor pidfd;                       // readable (POLLIN) once the process is dead
  long pid;                               // as it calls itself
};

struct Neighbourhood {
  std::vector<int> node_of;  // group rank -> number of its node (numbered by first rank)
  // Group rank -> neighbour; null: this rank, or on another node.
  std::vector<std::shared_ptr<const Neighbour>> at;
  // This rank's area, if the neighbours have been told of it, and where each of theirs is, by rank.
  std::shared_ptr<GroupArea> area = nullptr;
  std::vector<uint64_t> areas = {};
};

// Every rank a node of its own.
Neighbourhood apart(int size);

// Finds out which ranks of a group that has met share memory with this one. All ranks call it, each
// with the segment and the listener that its Member names; all get the same nodes. `chunk_bytes` is
// what an operation of the group stages at a time.
//
// What fails on one rank is thrown there and reaches all as in bootstrap::gather(). Throws
// Error(kTimeout) or Error(kPeer) naming ranks that did not come, or ended.
Neighbourhood explore(const bootstrap::Rendezvous& rendezvous, NeighbourListener& listener,
                      const std::shared_ptr<memory::SharedSegment>& segment, size_t chunk_bytes);

// The parts of explore().

// mapped[a][b] is '1' if rank a has mapped b's segment. The ranks of a node have all mapped one
// another; each rank, in order, joins the first node where this holds. Returns node numbers by
// rank, numbered by first rank.
std::vector<int> partition(const std::vector<std::string>& mapped);

// Names a member's segment among those of all processes.
std::string neighbour_key(const bootstrap::Member& member);

// Null if there is none: nobody has remembered it, or no group uses it any more.
std::shared_ptr<const Neighbour> known_neighbour(const std::string& key);

void remember_neighbour(const std::string& key, const std::shared_ptr<const Neighbour>& neighbour);

}  // namespace hbm::shm
