// The base of operations between nodes: a group's communicator, which is MPI's or of TCP links
// (tcp/links.h), its staging memory, and orphaned requests.
//
// Threads: MPI runs at MPI_THREAD_MULTIPLE, and links have a mutex, so any thread may call every
// function.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "communicator/carrier.h"
#include "communicator/message.h"
#include "communicator/mpi/tuning.h"
#include "memory/staging.h"

namespace hbm::communicator::mpi {

// The communicator of a group or of a rail.
class Comm {
 public:
  // Takes ownership of `comm`, and shares the carrier.
  Comm(std::shared_ptr<const Carrier> carrier, CommHandle comm);

  // Frees the communicator, unless leak() was called.
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  Request isend(const void* data, size_t bytes, int peer, int tag);

  // Starts a receive of at most `bytes`.
  Request irecv(void* data, size_t bytes, int peer, int tag);

  // Starts to receive a message that has arrived, from any peer, and sets `peer` to the sender.
  // Returns null if no message has arrived. A posted MPI_ANY_SOURCE receive would do the same. But
  // with it MPICH 5.0.2 loses some messages if peers are on this node and on others.
  Request irecv_any(void* data, size_t bytes, int tag, int& peer);

  // Asks the carrier to cancel a receive. The request must still be completed.
  void cancel_receive(Request request) noexcept;

  // Asks the carrier to access the data of the sends among `requests` no longer. Ignores null
  // requests.
  void withdraw(const std::vector<Request>& requests) noexcept;

  // Prevents the communicator from being freed, after an operation was cancelled. MPI may still use
  // it. If it were freed, MPI would give its id to the next communicator of the same ranks, which
  // would receive late messages of this communicator. TCP links have no ids to keep: they are
  // closed with the last communicator that uses them.
  void leak() noexcept { leaked_ = true; }

  const Carrier& carrier() const noexcept { return *carrier_; }

  // Returns true in a forked child, where the carrier is the parent's and must not be called.
  bool in_child() const noexcept { return fork_.in_child(); }

  // Tags: [0, user_tags()) are for send and recv. [user_tags(), 2 * user_tags()) are for the chunks
  // of longer sends. Collectives have two more tags in each tag range.
  int user_tags() const noexcept { return user_tags_; }
  int data_tag(uint64_t transfer) const noexcept {
    return user_tags_ + static_cast<int>(transfer % static_cast<uint64_t>(user_tags_));
  }
  int collective_tag(int tag_range, int phase) const noexcept {
    return 2 * user_tags_ + 2 * tag_range + phase;
  }

 private:
  const std::shared_ptr<const Carrier> carrier_;
  const ForkGuard fork_;
  const CommHandle comm_;
  const int user_tags_;
  bool leaked_ = false;
};

// Some or all ranks of a group, their communicator, and their staging memory.
struct Channel {
  int rank = 0;
  int size = 1;
  int tag_range = 0;                   // below kTagRanges
  std::vector<int> group_ranks;        // by channel rank; empty: equal to the channel ranks
  std::string group;                   // as errors name it, such as: group "0"
  uint64_t group_number = 0;           // in the headers of all messages
  std::shared_ptr<Comm> communicator;  // null in a group of one
  std::shared_ptr<memory::StagingPool> staging;
  size_t chunk_bytes = 0;  // payload of the largest message; equal on all ranks
  // Returns the round-trip time of the most distant peer, 0 if it is not known. Empty: never known.
  std::function<std::chrono::microseconds()> round_trip;

  // Returns the header of a message in this group.
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

// Returns the chunk of a group of `size` ranks: the largest with which an operation stays within
// `staging_bytes` and kMostOperationBytes. With the smallest chunk an operation may exceed
// kMostOperationBytes. Throws Error(kInvalid), with the bytes needed, if even the smallest chunk
// needs more than `staging_bytes`.
size_t chunk_bytes(uint64_t staging_bytes, int size);

// Keeps `memory`, which MPI may still access, until MPI has completed every request of a cancelled
// operation. So a late message arrives in memory that no other object uses, and the memory leaks if
// MPI never completes the requests. TCP links complete them immediately. Ignores null requests.
// Leaks `communicator`. REQUIRES: the caller has cancelled the receives. This function withdraws
// the sends.
void orphan_requests(const std::shared_ptr<Comm>& communicator, std::vector<Request> requests,
                     memory::StagingBuffer memory) noexcept;

// Frees the memory of orphaned requests that have completed. Returns the bytes of the orphaned
// requests that remain in this process.
size_t sweep_orphaned() noexcept;

}  // namespace hbm::communicator::mpi
