// The operations from which the collectives are made. Each works over a channel, which has all
// ranks of a group (mpi/communicator.h) or one leader of each node (hierarchical/). Ranks are the
// channel's ranks. The root in a signature, used only in errors and headers, is a group rank.
//
// `reported`: the count of elements in headers and errors. The operation fails if ranks have
// different values of it.
//
// Making an operation allocates all the memory that it needs, or throws Error(kExhausted).
//
// Threads: any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/message.h"
#include "communicator/mpi/channel.h"
#include "communicator/scatter_gather.h"

namespace hbm::communicator::mpi {

// A transfer, with the ranks that receive it (outgoing) or the rank that sends it (incoming).
struct OutgoingTransfer {
  Sources entries;
  std::vector<int> peers;
  size_t reported;
};
struct IncomingTransfer {
  Sinks entries;
  int peer;
  size_t reported;
};

// A rank's transfer to itself, copied in begin().
struct OwnPart {
  Source source;
  Sink sink;
};

// Sends at most one transfer to each other rank, and receives at most one from each.
OperationPtr make_exchange(std::shared_ptr<Channel> channel, const Signature& signature,
                           size_t count, std::vector<OutgoingTransfer> outgoing,
                           std::vector<IncomingTransfer> incoming, OwnPart own);

// Broadcasts `count` elements, which may be a part of a tensor of `reported` elements. `reported`
// decides the algorithm.
OperationPtr make_broadcast(std::shared_ptr<Channel> channel, const Signature& signature,
                            void* data, size_t count, int root, size_t reported);

// Broadcasts along a chain of the ranks that begins at the root: each link carries one transfer at
// a time. The last link waits for the data of the links before it. `data` is sent in chunks of the
// channel.
OperationPtr make_chain_broadcast(std::shared_ptr<Channel> channel, const Signature& signature,
                                  void* data, size_t count, int root, size_t reported);

struct Reduction {
  const void* in;
  void* out;  // used on ranks that take the result
  size_t count;
  int root;  // -1: all ranks get the result
  Combining how;
  size_t reported;
};

// Reduces in the order of the channel's ranks, to all ranks or to a root. Errors and headers use
// the operator in the signature. If the signature has a wider type of partial results, `in` has
// that type, and `out` has the tensors' type; `out` may still be `in`. This also holds for
// make_reduce_scatter().
OperationPtr make_reduction(std::shared_ptr<Channel> channel, const Signature& signature,
                            const Reduction& reduction);

// Reduces inputs[r] of all ranks to `out` on rank r. `reported`: by rank, the count in headers and
// errors.
OperationPtr make_reduce_scatter(std::shared_ptr<Channel> channel, const Signature& signature,
                                 std::vector<Source> inputs, void* out, Combining how,
                                 std::vector<size_t> reported);

}  // namespace hbm::communicator::mpi
