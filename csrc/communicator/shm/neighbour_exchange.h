// Ranks that have reached one another by socket hand over what a neighbour needs: descriptors of
// their memory and of their process.
//
// Threads: called by one at a time, for one NeighbourListener.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "base/descriptor.h"
#include "bootstrap/gather.h"
#include "communicator/shm/neighbour_listener.h"

namespace hbm::shm {

// The packet that goes over the socket, between ranks of the same version.
struct Greeting {
  std::array<char, 64> key{};    // whose and which segment, see neighbour_key(); zeros behind it
  uint64_t segment_bytes = 0;    //
  uint64_t proof_offset = 0;     // where in the segment
  std::array<char, 32> proof{};  // these bytes lie
  uint64_t area_offset = 0;      // where in the segment its area is; 0: to be told later
};
static_assert(sizeof(Greeting) == 120);

struct Introduction {
  Greeting greeting;
  Descriptor memory;
  Descriptor pidfd;
};

// Hands `own` to `peers` (key to rank), and returns what each of them handed over. This rank has
// called those in `called`, over these sockets; the others have called here, and wait at
// `listener`. Throws Error(kPeer) naming a rank that ended meanwhile, Error(kTimeout) naming those
// that did not come before the participant's deadline.
std::map<int, Introduction> exchange(const bootstrap::Participant& participant,
                                     const Introduction& own, std::map<int, Descriptor> called,
                                     NeighbourListener& listener,
                                     const std::map<std::string, int>& peers);

}  // namespace hbm::shm
