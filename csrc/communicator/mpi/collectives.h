// The operations over a channel of which the collectives are made, of a whole group
// (mpi/communicator.h) or of one leader of each node (hierarchical/). Ranks here are the channel's;
// the root in a signature, which only errors and headers show, is the group's.
//
// `told`: the count of elements that headers and errors show. Ranks that disagree in it fail.
//
// Making an operation takes all the memory that it needs (Error(kExhausted)).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/message.h"
#include "communicator/mpi/channel.h"
#include "communicator/pieces.h"

namespace hbm::mpi {

// A stream and the ranks that get it.
struct OutgoingStream {
  Sources pieces;
  std::vector<int> peers;
  size_t told;
};
struct IncomingStream {
  Sinks pieces;
  int peer;
  size_t told;
};

// A rank's part for itself, copied in begin().
struct OwnPart {
  Source source;
  Sink sink;
};

// At most one stream to and one from each other rank.
OperationPtr make_exchange(std::shared_ptr<Channel> channel, const Signature& signature,
                           size_t count, std::vector<OutgoingStream> outgoing,
                           std::vector<IncomingStream> incoming, OwnPart own);

// A part of a broadcast of `told` elements, whose size decides how.
OperationPtr make_broadcast(std::shared_ptr<Channel> channel, const Signature& signature,
                            void* data, size_t count, int root, size_t told);

// The same along a chain of the ranks, from the root on: one stream at a time on each link, the
// last of which waits for what the others carry first. `data` is cut by the channel's chunk.
OperationPtr make_chain_broadcast(std::shared_ptr<Channel> channel, const Signature& signature,
                                  void* data, size_t count, int root, size_t told);

struct Reduction {
  const void* in;
  void* out;  // used where the result goes
  size_t count;
  int root;  // -1: all ranks get the result
  Combining how;
  size_t told;
};

// An allreduce or a reduce, in the order of the channel's ranks. What errors and headers show of
// the operator stands in the signature. Where that has partial results in a wider type, `in` is of
// that type, and `out`, which may be `in` nevertheless, of the tensors' (also in a reduce_scatter).
OperationPtr make_reduction(std::shared_ptr<Channel> channel, const Signature& signature,
                            const Reduction& reduction);

// inputs[r]: what rank r gets the reduction of. `told`: by rank, what is told of its stream.
OperationPtr make_reduce_scatter(std::shared_ptr<Channel> channel, const Signature& signature,
                                 std::vector<Source> inputs, void* out, Combining how,
                                 std::vector<size_t> told);

}  // namespace hbm::mpi
