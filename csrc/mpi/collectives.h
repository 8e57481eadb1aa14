// The collectives over MPI. MPI moves bytes; the reductions are ours (reduce/reduce.h), so their
// order is fixed and every rank gets the same bits (docs/design.md, "Collectives").
//
// Each function makes one Operation for the queue. Nothing is sent before begin(), and the
// construction takes all the memory that the operation needs (Error(kExhausted)). Buffers are
// contiguous, belong to the caller and must live until the operation is done or abandoned; an
// abandoned operation no longer touches them.
//
// Every rank of the group makes the same operation with the same `sequence`, in the same order.
// Counts are elements. Ranks are group ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/operation.h"
#include "mpi/channel.h"
#include "mpi/message.h"

namespace hbm::mpi {

using ChannelPtr = std::shared_ptr<Channel>;

struct Source {
  const void* data = nullptr;
  size_t count = 0;
};

struct Sink {
  void* data = nullptr;
  size_t count = 0;
};

// out = in_0 op in_1 op ... (in rank order) on every rank. `out` may be `in`.
std::unique_ptr<Operation> make_allreduce(ChannelPtr channel, uint64_t sequence, const void* in,
                                          void* out, size_t count, Dtype dtype, ReduceOp op);

// The same, on `root` alone; `out` is not used elsewhere.
std::unique_ptr<Operation> make_reduce(ChannelPtr channel, uint64_t sequence, const void* in,
                                       void* out, size_t count, Dtype dtype, ReduceOp op, int root);

// out on rank r = the reduction of every rank's inputs[r]. `out` may be inputs[rank].data.
std::unique_ptr<Operation> make_reduce_scatter(ChannelPtr channel, uint64_t sequence,
                                               const std::vector<Source>& inputs, void* out,
                                               Dtype dtype, ReduceOp op);

std::unique_ptr<Operation> make_broadcast(ChannelPtr channel, uint64_t sequence, void* data,
                                          size_t count, Dtype dtype, int root);

// outputs[r] = rank r's input. The counts may differ from rank to rank; outputs[rank].data may be
// the input.
std::unique_ptr<Operation> make_allgather(ChannelPtr channel, uint64_t sequence, Source in,
                                          const std::vector<Sink>& outputs, Dtype dtype);

// As allgather, but only `root` has outputs (empty elsewhere).
std::unique_ptr<Operation> make_gather(ChannelPtr channel, uint64_t sequence, Source in,
                                       const std::vector<Sink>& outputs, Dtype dtype, int root);

// out on rank r = root's inputs[r] (empty elsewhere).
std::unique_ptr<Operation> make_scatter(ChannelPtr channel, uint64_t sequence,
                                        const std::vector<Source>& inputs, Sink out, Dtype dtype,
                                        int root);

// outputs[r] on rank s = inputs[s] on rank r.
std::unique_ptr<Operation> make_alltoall(ChannelPtr channel, uint64_t sequence,
                                         const std::vector<Source>& inputs,
                                         const std::vector<Sink>& outputs, Dtype dtype);

std::unique_ptr<Operation> make_barrier(ChannelPtr channel, uint64_t sequence);

}  // namespace hbm::mpi
