// An MPI communicator of one group, and the messages that were given up on it.
//
// Threads: MPI runs at MPI_THREAD_MULTIPLE, so every member may be called from any thread.
#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "communicator/mpi/library.h"

namespace hbm::mpi {

class Comm {
 public:
  // Takes over `comm`, whose ranks are the group's.
  Comm(const MpiLibrary& library, MPI_Comm comm);

  // Frees the communicator, unless leak() was called.
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  MPI_Request isend(const void* data, size_t bytes, int peer, int tag);

  // `bytes` is the most that may arrive.
  MPI_Request irecv(void* data, size_t bytes, int peer, int tag);

  // Receives a message that is there already, from whichever peer sent it, and sets `peer`;
  // MPI_REQUEST_NULL if there is none. A posted MPI_ANY_SOURCE receive would do the same, but MPICH
  // 5.0.2 loses some when peers are on this node and on others.
  MPI_Request irecv_any(void* data, size_t bytes, int tag, int& peer);

  // Asks MPI to give up a receive; the request still has to be completed.
  void cancel_receive(MPI_Request& request) noexcept;

  // After an operation was given up MPI still refers to the communicator: it must not be freed.
  void leak() noexcept { leaked_ = true; }

  const MpiLibrary& mpi() const noexcept { return mpi_; }

  // In a forked child MPI's state is the parent's, and nothing may be asked of it.
  bool in_child() const noexcept { return fork_.in_child(); }

  // Tags: [0, user_tags()) are for send and recv, [user_tags(), 2 * user_tags()) for the data of
  // large sends, and the collectives have two more.
  int user_tags() const noexcept { return user_tags_; }
  int data_tag(uint64_t transfer) const noexcept {
    return user_tags_ + static_cast<int>(transfer % static_cast<uint64_t>(user_tags_));
  }
  int collective_tag(int phase) const noexcept { return 2 * user_tags_ + phase; }

 private:
  const MpiLibrary& mpi_;
  const ForkGuard fork_;
  MPI_Comm comm_;
  int user_tags_;
  bool leaked_ = false;
};

}  // namespace hbm::mpi
