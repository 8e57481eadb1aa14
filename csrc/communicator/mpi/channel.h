// The base of operations over MPI: a group's MPI communicator, where to stage, and the messages
// that were given up.
//
// Threads: MPI runs at MPI_THREAD_MULTIPLE, so all may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "communicator/message.h"
#include "communicator/mpi/api.h"
#include "communicator/mpi/tuning.h"
#include "memory/staging.h"

namespace hbm::mpi {

// An MPI communicator of one group.
class Comm {
 public:
  // Takes over `comm`, whose ranks are the group's.
  Comm(const Api& mpi, CommHandle comm);

  // Frees the communicator, unless leak() was called.
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  Request isend(const void* data, size_t bytes, int peer, int tag);

  // `bytes` is the most that may arrive.
  Request irecv(void* data, size_t bytes, int peer, int tag);

  // Receives a message that is there already, from whichever peer sent it, and sets `peer`; null
  // if there is none. A posted MPI_ANY_SOURCE receive would do the same, but MPICH 5.0.2 loses some
  // when peers are on this node and on others.
  Request irecv_any(void* data, size_t bytes, int tag, int& peer);

  // Asks MPI to give up a receive; the request still has to be completed.
  void cancel_receive(Request request) noexcept;

  // Keeps the communicator from being freed after an operation was given up: MPI may still refer to
  // it, and would give its id to the next communicator of the same ranks, which would take a late
  // message for one of its own.
  void leak() noexcept { leaked_ = true; }

  const Api& mpi() const noexcept { return mpi_; }

  // In a forked child MPI's state is the parent's, and nothing may be asked of it.
  bool in_child() const noexcept { return fork_.in_child(); }

  // Tags: [0, user_tags()) are for send and recv, [user_tags(), 2 * user_tags()) for the data of
  // large sends, and the collectives have two more in each lane.
  int user_tags() const noexcept { return user_tags_; }
  int data_tag(uint64_t transfer) const noexcept {
    return user_tags_ + static_cast<int>(transfer % static_cast<uint64_t>(user_tags_));
  }
  int collective_tag(int lane, int phase) const noexcept {
    return 2 * user_tags_ + 2 * lane + phase;
  }

 private:
  const Api& mpi_;
  const ForkGuard fork_;
  const CommHandle comm_;
  const int user_tags_;
  bool leaked_ = false;
};

// The ranks of a group, or some of them, their MPI communicator, and where their operations stage.
struct Channel {
  int rank = 0;
  int size = 1;
  int lane = 0;                        // below kLanes
  std::vector<int> group_ranks;        // what its ranks are in the group; empty: the same
  std::string group;                   // as errors name it: "group default_pg"
  uint64_t group_number = 0;           // in the headers of its messages
  std::shared_ptr<Comm> communicator;  // null in a group of one
  std::shared_ptr<memory::StagingPool> staging;
  size_t chunk_bytes = 0;  // payload of the largest message; equal on all ranks

  // The header of a message in this group.
  MessageHeader header(const Signature& signature, uint64_t count, uint32_t part,
                       uint64_t payload) const noexcept {
    MessageHeader made = make_header(signature, count, part, payload);
    made.group = group_number;
    return made;
  }

  int group_rank(int peer) const {
    return group_ranks.empty() ? peer : group_ranks[static_cast<size_t>(peer)];
  }
};

// The chunk of a group of `size` ranks: the largest with which an operation stays within
// `staging_bytes` and within what one operation may take. Throws Error(kInvalid), saying how much
// is needed, if not even the smallest fits.
size_t chunk_bytes(uint64_t staging_bytes, int size);

// Messages that were given up on, with the staging memory that MPI may still touch: keeps `memory`
// until every request (null ones are passed over) is complete. Receives are cancelled before; a
// send cannot be. The memory is returned when MPI has let go of it, and never if it does not: a
// late message may then land where nobody else looks. `communicator` is leaked.
void abandon_requests(const std::shared_ptr<Comm>& communicator, std::vector<Request> requests,
                      memory::StagingBuffer memory) noexcept;

// Returns the memory of what has completed since, and says how many bytes are still held by this
// process' abandoned requests.
size_t sweep_abandoned() noexcept;

}  // namespace hbm::mpi
