// Messages that were given up on, with the staging memory that MPI may still touch.
//
// Receives are cancelled before they are buried; a send cannot be. The memory is returned when MPI
// has let go of it, and never if it does not: a late message may then land where nobody else looks.
#pragma once

#include <memory>
#include <vector>

#include "communicator/mpi/channel.h"
#include "memory/staging.h"

namespace hbm::mpi {

// Keeps `memory` until every request (null ones are passed over) is complete. Thread-safe. The
// channel's communicator is leaked unless all complete at once.
void abandon_requests(const std::shared_ptr<Channel>& channel, std::vector<MPI_Request> requests,
                      memory::StagingBuffer memory) noexcept;

// Returns the memory of what has completed since, and says how many bytes are still held.
size_t sweep() noexcept;

}  // namespace hbm::mpi
