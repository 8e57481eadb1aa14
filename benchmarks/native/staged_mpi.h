// Collectives of a plain program over MPI's messages, which stages its data as hbm does. The sender
// copies a chunk of its tensor to a staging buffer and sends the chunk. The receiver copies the
// chunk from a staging buffer to its tensor.
#pragma once

#include <functional>
#include <string>

#include "collective_loops.h"
#include "mpi_loops.h"

namespace hbm::bench {

// Returns a function that runs "allreduce_staged", "broadcast_staged" or "gather_staged" once, and
// returns MPI's error code. The function is empty for other names. The buffers are in place except
// in the gather, as in CollectiveBuffers. The staging memory is from the process's segment, as
// hbm's.
std::function<int()> staged_call(const MpiWorld& world, const std::string& collective,
                                 const CollectiveBuffers& buffers);

}  // namespace hbm::bench
