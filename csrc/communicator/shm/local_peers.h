// Finds the ranks of a group that share memory with this rank. Two ranks of one machine may still
// share no memory, so they map each other's segments. Each rank then checks that the mapped segment
// holds the bytes that its owner has written.
//
// Descriptors pass over Unix sockets, and all other steps use the store. The search starts no
// thread, and every wait ends at the deadline of the rendezvous. A process remembers a local peer
// as long as some group uses it, so a further group of the same ranks needs no sockets.
//
// Two usual cases take a few keys of the store. In the first case, every rank remembers all other
// ranks of its machine as local peers. In the second case, no rank remembers a local peer, and all
// ranks of each machine can share memory. Any other case takes some keys for each rank.
//
// Threads: any thread may call every function, also for several groups at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/shared_mapping.h"
#include "bootstrap/rendezvous.h"
#include "communicator/shm/group_region.h"
#include "communicator/shm/peer_listener.h"
#include "memory/segment.h"

namespace hbm::communicator::shm {

// Another process on this node.
struct LocalPeer {
  std::shared_ptr<SharedMapping> memory;  // the process's segment of the group's policy
  Descriptor pidfd;                       // readable (POLLIN) after the process has ended
  long pid;                               // in the PID namespace of that process
};

struct LocalPeers {
  // The node of each group rank. Nodes are numbered in the order of their first ranks.
  std::vector<int> node_of;
  // By group rank; null: this rank, or a rank of another node.
  std::vector<std::shared_ptr<const LocalPeer>> at;
  // Set if the ranks of this node have already exchanged their control regions: this rank's region,
  // and the offset of each rank's region, by group rank. Otherwise `region` is null.
  std::shared_ptr<GroupRegion> region = nullptr;
  std::vector<uint64_t> regions = {};
};

// Returns a result in which every rank is a node of its own.
LocalPeers apart(int size);

// Finds the ranks of a group that share memory with this rank. All ranks of the rendezvous call it,
// each with the segment and the listener that its Member names. All ranks get the same nodes.
// `chunk_bytes`: the bytes that an operation of the group stages at a time.
//
// An error of one rank is thrown on that rank, and reaches all ranks as in bootstrap::gather().
// Throws Error(kTimeout) naming ranks that did not come, and Error(kDeath) naming ranks that have
// died. Throws Error(kPeer) naming ranks whose connections have ended, and Error(kUnavailable) if
// the kernel refuses a descriptor.
LocalPeers explore(const bootstrap::Rendezvous& rendezvous, PeerListener& listener,
                   const std::shared_ptr<memory::SharedSegment>& segment, size_t chunk_bytes);

// The parts of explore().

// Returns the node of each rank. mapped[a][b] is '1' if rank a has mapped b's segment. All ranks of
// a node have mapped one another: each rank, in order, joins the first node for which this holds.
// Nodes are numbered in the order of their first ranks.
std::vector<int> partition(const std::vector<std::string>& mapped);

// Returns a name for the segment of a member. The name is unique among all processes.
std::string local_peer_key(const bootstrap::Member& member);

// Returns the local peer that was remembered under `key`. Returns null if there is none, or if no
// group uses the local peer any more.
std::shared_ptr<const LocalPeer> known_local_peer(const std::string& key);

void remember_local_peer(const std::string& key,
                         const std::shared_ptr<const LocalPeer>& local_peer);

}  // namespace hbm::communicator::shm
