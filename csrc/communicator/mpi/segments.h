// The names of MPICH's shared memory in /dev/shm.
//
// Threads: any thread.
#pragma once

#include <string>

namespace hbm::communicator::mpi {

// Unlinks the segments of MPICH that the process has mapped. `process`: its name in /proc. MPICH
// leaves the names behind if a process is killed. A segment needs no name after every rank has
// mapped it. A process maps only segments of its own job.
void unlink_segments(const std::string& process = "self") noexcept;

}  // namespace hbm::communicator::mpi
