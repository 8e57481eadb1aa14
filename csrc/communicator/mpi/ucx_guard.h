// Guards that keep MPICH from ending a rank whose peer has died or left.
//
// MPICH 5.0 sends through UCX. If UCX knows that a connection is closed, its send functions return
// an error in place of a request. MPICH notes the error, and then uses the request, which is null:
// the rank ends by SIGSEGV. Two guards replace the two send functions, and report such a send as
// complete. No data is lost by this: the operation still waits for the part of the dead peer, until
// the report of the death ends the operation (communicator/peers.h).
//
// A third guard lets MPI_Finalize disconnect from a peer that has disconnected or died. Without it
// MPICH ends the process because of UCX's error.
//
// The guards work only in a shared library that is loaded before MPI.
//
// Threads: any thread.
#pragma once

namespace hbm::communicator::mpi {

// Makes an MPI library that is loaded after this call use the guards instead of UCX's functions.
void raise_ucx_guard() noexcept;

// Sets the real functions that the guards call. `library`: dlopen's handle of the MPI library.
void aim_ucx_guard(void* library) noexcept;

}  // namespace hbm::communicator::mpi
