// The names of MPICH's shared memory in /dev/shm.
//
// Threads: any thread.
#pragma once

#include <string>

namespace hbm::communicator::mpi {

// Unlinks the segments of MPICH that the process has mapped, because MPICH leaves their names
// behind if a process is killed. `process`: the name of the process in /proc. Called when nothing
// needs the names any more: every rank has mapped the segments, or the start of MPI has failed, or
// the process ends. A process maps only segments of its own job.
void unlink_segments(const std::string& process = "self") noexcept;

}  // namespace hbm::communicator::mpi
