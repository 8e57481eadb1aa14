// The names of MPICH's shared memory in /dev/shm.
#pragma once

#include <string>

namespace hbm::mpi {

// Unlinks the segments of MPICH that the process has mapped; `process` as /proc knows it. MPICH
// leaves the names behind when a process is killed. Once every rank has mapped a segment it needs
// no name; those that a process maps are its job's own.
void unlink_segments(const std::string& process = "self") noexcept;

}  // namespace hbm::mpi
