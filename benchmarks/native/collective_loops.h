// Times loops of collectives, for any implementation. Fills a rank's buffers, checks the results,
// and serves the commands of the programs that run the loops.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/dtype.h"

namespace hbm::bench {

// A rank's two buffers in a collective. A collective in place uses `received` alone.
struct CollectiveBuffers {
  const void* sent;
  void* received;
  size_t count;  // elements of the largest buffer on any rank
  Dtype dtype;
};

// An implementation of the collectives. torch_hbmcomm/bench/collectives.py defines roots and sizes.
// allgather, gather, scatter, reduce_scatter and alltoall go from one buffer to another, as in
// c10d. allreduce, broadcast and reduce are in place. In "gather_in_place" the root's part is
// already in `received`. "allreduce_staged", "broadcast_staged" and "gather_staged" have the
// buffers of the collective itself. In sendrecv, the two ranks of each pair (0, 1), (2, 3), ...
// send a message there and back; a last rank without a pair does nothing.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Allocates a buffer in the kind of memory that the benchmark measures. By default: private
  // memory.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes);

  // Returns a function that runs the collective once. Throws Error(kInvalid) if the implementation
  // lacks the collective.
  virtual std::function<void()> call(const std::string& collective,
                                     const CollectiveBuffers& buffers) = 0;
};

// A rank's pair in a sendrecv. whole: true if the rank has a peer. first: true if the rank sends
// before it receives.
struct Pair {
  Pair(int rank, int size) : peer(rank ^ 1), whole(peer < size), first(rank < peer) {}
  int peer;
  bool whole;
  bool first;
};

// Returns the number of elements in one rank's part. Throws Error(kInvalid) unless all parts are
// equal.
size_t share_of(size_t count, int size);

// Answers these commands (program.h) until the end of the input, and returns the exit status:
//
//   ready                          calls `join`, in which all ranks meet. Binds the thread to its
//                                  own processor, if there is one per rank.
//   prepare COLLECTIVE BYTES TYPE  allocates the buffers, and checks the result of a first call
//   run SAMPLES CALLS              times calls; all ranks get the same arguments
//
// If a collective has a part for each rank, its number of elements must be a multiple of the number
// of ranks.
// Types: "float32", "float64", "float16", "bfloat16", "int32".
int serve_collectives(const std::function<std::unique_ptr<Collectives>()>& join);

}  // namespace hbm::bench
