// The names of the shared memory of MPICH and UCX in /dev/shm.
//
// Threads: any thread.
#pragma once

#include <sys/types.h>

namespace hbm::communicator::mpi {

// Unlinks the segments of MPICH that this process has mapped, because MPICH leaves their names
// behind if a process is killed. Called when nothing needs the names any more: every rank has
// mapped the segments, or the start of MPI has failed, or the process ends. A process maps only
// segments of its own job.
void unlink_segments() noexcept;

// Unlinks the segments of MPICH and of UCX that a child process has mapped or holds open. Then the
// child can be killed and leaves no names behind. UCX unlinks its own segments too, but a moment
// after it has created them. REQUIRES: the child is stopped, and uses MPI for nothing but a start
// that has ended or failed.
void unlink_segments_of(pid_t child) noexcept;

}  // namespace hbm::communicator::mpi
