// Decides how many rounds or blocks of an operation are in flight at a time. Each rank decides for
// itself, while the operation runs. The ranks need not agree, because messages of equal tags are
// received in the order in which they were sent.
//
// Two rounds keep a link busy if messages arrive immediately: a rank copies one while the link
// carries the other. A link with a delay carries more than two rounds at a time. There the bytes in
// flight grow with the round-trip time of TCP, up to kMostOperationBytes. TCP itself finds the
// rate: messages beyond it wait in this process.
//
// Threads: as for Channel.
#pragma once

#include <cstddef>

#include "communicator/mpi/channel.h"
#include "memory/staging.h"

namespace hbm::communicator::mpi {

// Returns true if the round-trip time is kDistantRoundTrip or more.
bool is_distant(const Channel& channel);

// Returns the number of rounds to keep in flight, at least kLeastInFlight. `bytes`: the staging
// memory of a round. Reads the round-trip time, so the value may change at any time.
size_t rounds_in_flight(const Channel& channel, size_t bytes);

// Returns staging memory for a further round. Returns none if the budget or the machine has no room
// for it: the operation then continues with the rounds that it has.
memory::StagingBuffer spare_memory(const Channel& channel, size_t bytes);

}  // namespace hbm::communicator::mpi
