// Exchanges the descriptors of memory and of processes between ranks that have connected by
// sockets.
//
// Threads: one call at a time for each PeerListener.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "base/descriptor.h"
#include "bootstrap/gather.h"
#include "communicator/shm/peer_listener.h"

namespace hbm::communicator::shm {

// The packet that a rank sends over the socket. Both ranks run the same version, so the struct is
// the format.
struct Greeting {
  std::array<char, 64> key{};  // names process and segment, see local_peer_key(); padded with zeros
  uint64_t segment_bytes = 0;
  uint64_t proof_offset = 0;     // offset in the segment
  std::array<char, 32> proof{};  // the bytes at proof_offset
  uint64_t region_offset = 0;    // offset of the control region; 0: published later
};
static_assert(sizeof(Greeting) == 120);

struct Introduction {
  Greeting greeting;
  Descriptor memory;
  Descriptor pidfd;
};

// Sends `own` to the peers, and returns the introduction of each peer, by rank. `peers`: the rank
// of each peer, by its Greeting::key. `called`: by rank, the sockets over which this rank has
// called peers. The other peers have called this rank, and wait at `listener`. Throws Error(kDeath)
// naming a rank that has died, and Error(kPeer) naming ranks whose connections have ended. Throws
// Error(kTimeout) naming the ranks that did not come before the participant's deadline.
std::map<int, Introduction> exchange(const bootstrap::Participant& participant,
                                     const Introduction& own, std::map<int, Descriptor> called,
                                     PeerListener& listener,
                                     const std::map<std::string, int>& peers);

}  // namespace hbm::communicator::shm
