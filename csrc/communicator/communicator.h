// The operations of a process group over one kind of communication: shared memory within a node
// (shm/), messages between nodes (mpi/), or both (hierarchical/). The messages go over MPI or over
// TCP links (carrier.h). Each kind implements Communicator; connect/connect.cpp chooses one and
// makes its object. peers.h is the group's view of its other ranks.
//
// Ownership: each function makes one Operation for an OperationQueue. The operation keeps alive all
// objects that it uses. It sends nothing before begin(). Buffers are contiguous, belong to the
// caller and must live until the operation is done or abandoned. If Operation::peers_may_write() is
// true after abandon(), the caller must not reuse or free the buffers.
//
// Every rank of the group makes the same collectives, each with the same `sequence`, in the same
// order. A large collective may be made as chunks: several collectives with one number. Each chunk
// is made when the previous chunk is done. Counts are elements. Ranks are group ranks.
//
// Errors: a function, or begin() of its operation, throws Error(kExhausted) if there is no memory
// to stage in.
//
// Threads: any thread may call every function except preallocated_allreduce().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "communicator/message.h"
#include "progress/operation.h"

namespace hbm::communicator {

struct Source {
  const void* data = nullptr;
  size_t count = 0;
};

struct Sink {
  void* data = nullptr;
  size_t count = 0;
};

// A part of a buffer.
struct ElementRange {
  size_t offset = 0;  // elements
  size_t count = 0;
};

inline constexpr ElementRange kAllElements{0, SIZE_MAX};

// An operator, and the number of ranks that AVG divides by.
struct Combining {
  ReduceOp op;
  size_t divisor;
};

using OperationPtr = std::unique_ptr<progress::Operation>;

class SharedWindow;  // communicator/shared_window.h

// As the argument `from` of receive(): any rank.
inline constexpr int kAnyRank = -1;

// The memory that a communicator holds, in bytes.
struct CommunicatorMemory {
  uint64_t slots_bytes = 0;  // this rank's control region, in the segment
  // Staging memory of orphaned requests of all groups of this process: MPI may still access it.
  uint64_t orphaned_bytes = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  // out = in_0 op in_1 op ... on every rank. `out` may be `in`. The data is reduced in the order of
  // the ranks. Over several nodes, each node first reduces the data of its own ranks, and then the
  // nodes' results are reduced.
  virtual OperationPtr allreduce(OperationNumber sequence, const void* in, void* out, size_t count,
                                 Dtype dtype, ReduceOp op) = 0;

  // Reduces as allreduce() does, on `root` alone. Other ranks do not use `out`.
  virtual OperationPtr reduce(OperationNumber sequence, const void* in, void* out, size_t count,
                              Dtype dtype, ReduceOp op, int root) = 0;

  // out on rank r = the reduction of every rank's inputs[r]. `out` may be inputs[rank].data.
  virtual OperationPtr reduce_scatter(OperationNumber sequence, const std::vector<Source>& inputs,
                                      void* out, Dtype dtype, ReduceOp op) = 0;

  virtual OperationPtr broadcast(OperationNumber sequence, void* data, size_t count, Dtype dtype,
                                 int root) = 0;

  // outputs[r] = rank r's input. Counts may differ between ranks. outputs[rank].data may be the
  // input.
  virtual OperationPtr allgather(OperationNumber sequence, Source in,
                                 const std::vector<Sink>& outputs, Dtype dtype) = 0;

  // Gathers as allgather() does, on `root` alone. `outputs` is empty on other ranks.
  virtual OperationPtr gather(OperationNumber sequence, Source in, const std::vector<Sink>& outputs,
                              Dtype dtype, int root) = 0;

  // out on rank r = root's inputs[r]. `inputs` is empty on other ranks.
  virtual OperationPtr scatter(OperationNumber sequence, const std::vector<Source>& inputs,
                               Sink out, Dtype dtype, int root) = 0;

  // outputs[r] on rank s = inputs[s] on rank r.
  virtual OperationPtr alltoall(OperationNumber sequence, const std::vector<Source>& inputs,
                                const std::vector<Sink>& outputs, Dtype dtype) = 0;

  virtual OperationPtr barrier(OperationNumber sequence) = 0;

  // Sends `in`. REQUIRES, also for receive(): 0 <= tag < tags(); the peer is another rank.
  virtual OperationPtr send(Source in, Dtype dtype, int to, int tag) = 0;

  // Receives into `out`. Sets `*source` to the sender's rank when the operation is done. `from` may
  // be kAnyRank.
  virtual OperationPtr receive(Sink out, Dtype dtype, int from, int tag,
                               std::shared_ptr<int> source) = 0;

  virtual int tags() const = 0;

  // Returns true if preallocated_allreduce() accepts a tensor: a short one to which no other rank
  // writes.
  virtual bool preallocates_allreduce(const void* /*data*/, size_t /*bytes*/) const noexcept {
    return false;
  }

  // Returns an operation that reduces `data` in place. The communicator owns the operation and
  // reuses its storage, so the call allocates nothing and takes no lock. The operation is valid
  // until the next call. REQUIRES: preallocates_allreduce(), one thread at a time calls it, and the
  // operation of the previous call is over. The last two conditions hold after
  // OperationQueue::try_claim().
  virtual progress::Operation* preallocated_allreduce(OperationNumber /*sequence*/, void* /*data*/,
                                                      size_t /*count*/, Dtype /*dtype*/,
                                                      ReduceOp /*op*/) {
    return nullptr;
  }

  // Returns the ranks whose memory this rank can access, itself included, ascending. Empty if the
  // communicator shares no memory. A window needs all ranks of the group.
  virtual std::vector<int> memory_ranks() const { return {}; }

  // Makes this rank's part of a window, with the `bytes` bytes at `data` (shared_window.h). Returns
  // null if not all of these bytes are in this rank's segment of the group. Throws
  // Error(kExhausted) if the segment has no room for the counts of signals. REQUIRES:
  // memory_ranks() has all ranks of the group.
  virtual std::shared_ptr<SharedWindow> make_window(const void* /*data*/, size_t /*bytes*/) {
    return nullptr;
  }

  // Wakes the threads of this process that sleep in shared memory in Operation::sleep(). A thread
  // that sleeps until a message arrives over TCP wakes by itself, within 10 ms.
  virtual void wake() noexcept {}

  // Called when the group has failed. Prevents MPI from using the ids of this group's MPI
  // communicators again. Messages of the group's cancelled operations may still arrive, and a later
  // MPI communicator with the same id would receive them. REQUIRES: no thread drives an operation
  // of the group any more.
  virtual void invalidate() noexcept {}

  virtual CommunicatorMemory memory() const = 0;
};

}  // namespace hbm::communicator
