// Loops of collectives, for any implementation: the contents of a rank's buffers before and after,
// and the commands of a program that times the loops.
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
  size_t count;  // elements of the larger buffer of any rank
  Dtype dtype;
};

// An implementation of the collectives, with the roots and sizes of
// torch_hbmcomm/bench/collectives.py. allgather, gather, scatter, reduce_scatter and alltoall go
// from one buffer to another, as in c10d. allreduce, broadcast and reduce are in place. In
// "gather_in_place" the root's part is already in `received`. sendrecv goes forth and back within
// the pairs (0, 1), (2, 3), ...; an odd last rank does nothing.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Allocates memory of the kind to measure.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes);

  // Returns a function that runs the collective once. Throws Error(kInvalid) if the implementation
  // lacks the collective.
  virtual std::function<void()> call(const std::string& collective,
                                     const CollectiveBuffers& buffers) = 0;
};

// A rank's pair in a sendrecv. whole: the rank has a peer. first: the rank sends first.
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
//   ready                          calls `join`, and answers once all ranks have met. Then binds
//                                  the thread to its own processor, if there is one per rank.
//   prepare COLLECTIVE BYTES TYPE  allocates the buffers, and checks the result of a first call
//   run SAMPLES CALLS              times calls; all ranks get the same arguments
//
// If a collective has a part for each rank, its elements must be a multiple of the number of ranks.
// Types: "float32", "float64", "float16", "bfloat16".
int serve_collectives(const std::function<std::unique_ptr<Collectives>()>& join);

}  // namespace hbm::bench
