// The operations of a process group, whatever moves the bytes: shared memory within a node (shm/),
// MPI (mpi/), or both (hierarchical/). A new way to move bytes between ranks is another
// implementation of Communicator; connect/connect.cpp chooses and makes one. peers.h has what the
// group knows of its other ranks.
//
// Ownership: each function makes one Operation for the queue, which keeps alive what it stands on.
// Nothing is sent before begin(). Buffers are contiguous, belong to the caller and must live until
// the operation is done or abandoned (Operation::peers_may_write() tells of one that must live on).
//
// Every rank of the group makes the same collective with the same `sequence`, in the same order.
// Collectives of one number (chunks) are made one after the other: each when the one before is
// done. Counts are elements. Ranks are group ranks.
//
// Errors: functions throw Error(kExhausted) when there is no memory to stage in.
//
// Threads: any, but for small_allreduce().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "communicator/message.h"
#include "progress/operation.h"

namespace hbm {

struct Source {
  const void* data = nullptr;
  size_t count = 0;
};

struct Sink {
  void* data = nullptr;
  size_t count = 0;
};

// Part of a buffer.
struct ElementRange {
  size_t offset = 0;  // elements
  size_t count = 0;
};

inline constexpr ElementRange kAllElements{0, SIZE_MAX};

// An operator, and how many ranks AVG divides by.
struct Combining {
  ReduceOp op;
  size_t divisor;
};

using OperationPtr = std::unique_ptr<Operation>;

// `from` of a receive from any rank.
inline constexpr int kAnyRank = -1;

// How much of the memory that a group was given its communicator holds.
struct CommunicatorMemory {
  uint64_t slots_bytes = 0;      // of the segment: shared with the node's ranks
  uint64_t abandoned_bytes = 0;  // of staging: of failed transfers that MPI has not let go of
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  // out = in_0 op in_1 op ... (in rank order) on every rank. `out` may be `in`.
  virtual OperationPtr allreduce(OperationNumber sequence, const void* in, void* out, size_t count,
                                 Dtype dtype, ReduceOp op) = 0;

  // The same, on `root` alone; `out` is not used elsewhere.
  virtual OperationPtr reduce(OperationNumber sequence, const void* in, void* out, size_t count,
                              Dtype dtype, ReduceOp op, int root) = 0;

  // out on rank r = the reduction of every rank's inputs[r]. `out` may be inputs[rank].data.
  virtual OperationPtr reduce_scatter(OperationNumber sequence, const std::vector<Source>& inputs,
                                      void* out, Dtype dtype, ReduceOp op) = 0;

  virtual OperationPtr broadcast(OperationNumber sequence, void* data, size_t count, Dtype dtype,
                                 int root) = 0;

  // outputs[r] = rank r's input. The counts may differ from rank to rank; outputs[rank].data may be
  // the input.
  virtual OperationPtr allgather(OperationNumber sequence, Source in,
                                 const std::vector<Sink>& outputs, Dtype dtype) = 0;

  // The same on `root` alone; `outputs` is empty elsewhere.
  virtual OperationPtr gather(OperationNumber sequence, Source in, const std::vector<Sink>& outputs,
                              Dtype dtype, int root) = 0;

  // out on rank r = root's inputs[r] (empty elsewhere).
  virtual OperationPtr scatter(OperationNumber sequence, const std::vector<Source>& inputs,
                               Sink out, Dtype dtype, int root) = 0;

  // outputs[r] on rank s = inputs[s] on rank r.
  virtual OperationPtr alltoall(OperationNumber sequence, const std::vector<Source>& inputs,
                                const std::vector<Sink>& outputs, Dtype dtype) = 0;

  virtual OperationPtr barrier(OperationNumber sequence) = 0;

  // REQUIRES (both): 0 <= tag < tags(); the peer is another rank.
  virtual OperationPtr send(Source in, Dtype dtype, int to, int tag) = 0;

  // `*source` is set to the sender's rank once the operation is done.
  virtual OperationPtr receive(Sink out, Dtype dtype, int from, int tag,
                               std::shared_ptr<int> source) = 0;

  virtual int tags() const = 0;

  // An allreduce of fewer bytes than this may be run by small_allreduce(); 0: none.
  virtual size_t small_bytes() const noexcept { return 0; }

  // An allreduce of `data`, reduced in place, in storage of the communicator's: allocates nothing
  // and takes no lock. Valid until the next call; null if small_bytes() is 0. REQUIRES: one thread
  // at a time, whose operation before this one is over (as by OperationQueue::try_claim()).
  virtual Operation* small_allreduce(OperationNumber /*sequence*/, void* /*data*/, size_t /*count*/,
                                     Dtype /*dtype*/, ReduceOp /*op*/) {
    return nullptr;
  }

  // Wakes the threads of this process that sleep in Operation::sleep().
  virtual void wake() noexcept {}

  // The group has failed: messages of operations that were given up may still be on their way, so
  // no later communicator may be taken for this one. REQUIRES: no operation is driven any more.
  virtual void give_up() noexcept {}

  virtual CommunicatorMemory memory() const = 0;
};

}  // namespace hbm
