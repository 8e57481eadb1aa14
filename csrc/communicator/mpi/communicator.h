// The collectives over MPI (communicator/communicator.h says what each does). MPI moves bytes; the
// reductions are ours (kernels/reduce.h), so their order is fixed and every rank gets the same bits
// (docs/design/mpi.md).
//
// The construction of an operation takes all the memory that it needs (Error(kExhausted)); an
// abandoned one no longer touches the caller's buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/message.h"
#include "communicator/mpi/channel.h"

namespace hbm::mpi {

using ChannelPtr = std::shared_ptr<Channel>;

std::unique_ptr<Operation> make_allreduce(ChannelPtr channel, uint64_t sequence, const void* in,
                                          void* out, size_t count, Dtype dtype, ReduceOp op);

std::unique_ptr<Operation> make_reduce(ChannelPtr channel, uint64_t sequence, const void* in,
                                       void* out, size_t count, Dtype dtype, ReduceOp op, int root);

std::unique_ptr<Operation> make_reduce_scatter(ChannelPtr channel, uint64_t sequence,
                                               const std::vector<Source>& inputs, void* out,
                                               Dtype dtype, ReduceOp op);

std::unique_ptr<Operation> make_broadcast(ChannelPtr channel, uint64_t sequence, void* data,
                                          size_t count, Dtype dtype, int root);

std::unique_ptr<Operation> make_allgather(ChannelPtr channel, uint64_t sequence, Source in,
                                          const std::vector<Sink>& outputs, Dtype dtype);

std::unique_ptr<Operation> make_gather(ChannelPtr channel, uint64_t sequence, Source in,
                                       const std::vector<Sink>& outputs, Dtype dtype, int root);

std::unique_ptr<Operation> make_scatter(ChannelPtr channel, uint64_t sequence,
                                        const std::vector<Source>& inputs, Sink out, Dtype dtype,
                                        int root);

std::unique_ptr<Operation> make_alltoall(ChannelPtr channel, uint64_t sequence,
                                         const std::vector<Source>& inputs,
                                         const std::vector<Sink>& outputs, Dtype dtype);

std::unique_ptr<Operation> make_barrier(ChannelPtr channel, uint64_t sequence);

// All of them. The channel's communicator may be null in a group of one.
std::shared_ptr<Communicator> make_communicator(ChannelPtr channel);

}  // namespace hbm::mpi
