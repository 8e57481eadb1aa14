// Keeps MPICH from ending a rank whose peer has died or left.
//
// When UCX, below MPICH 5.0, knows that a connection is gone, its sends return an error where a
// request is expected; MPICH takes note of the error and then follows the request, which is null:
// the survivor ends by SIGSEGV. These guards stand in front of the two calls and report such a send
// as complete. Nothing is lost by that: the operation waits for the dead peer's part, until the
// report of its death ends it (communicator/peers.h).
//
// A third guard lets MPI_Finalize disconnect from a peer that has disconnected already, or has
// died: MPICH ends the process for the error that UCX returns.
//
// The guards have effect where this code is a shared library that is loaded before MPI.
#pragma once

namespace hbm::mpi {

// Puts the guards where the MPI library, loaded after this, finds them first.
void raise_ucx_guard() noexcept;

// Tells the guards where the real calls are. `library`: dlopen's handle of the MPI library.
void aim_ucx_guard(void* library) noexcept;

}  // namespace hbm::mpi
