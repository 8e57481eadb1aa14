// The collectives in loops, whoever does them: what a rank's buffers hold before and after, and the
// commands of a program that times them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/dtype.h"

namespace hbm::bench {

// A rank's two buffers in a collective; in place there is the received one alone.
struct CollectiveBuffers {
  const void* sent;
  void* received;
  size_t count;  // elements of the larger buffer of any rank
  Dtype dtype;
};

// Collectives, roots and sizes are those of torch_hbmcomm/bench/collectives.py. allgather, gather,
// scatter, reduce_scatter and alltoall go from one buffer to another, as in c10d; allreduce,
// broadcast and reduce are in place. "gather_in_place" has the root's part in its place already.
// sendrecv is there and back within the pairs (0, 1), (2, 3), ...; an odd last rank does nothing.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Memory of the kind that is measured.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes);

  // Returns what does it once. Throws Error(kInvalid) for what it does not offer.
  virtual std::function<void()> call(const std::string& collective,
                                     const CollectiveBuffers& buffers) = 0;
};

// Whether the rank has a peer in a sendrecv, and whether it sends first.
struct Pair {
  Pair(int rank, int size) : peer(rank ^ 1), whole(peer < size), first(rank < peer) {}
  int peer;
  bool whole;
  bool first;
};

// The elements of one rank's part. Throws Error(kInvalid) unless all have as many.
size_t share_of(size_t count, int size);

// Answers these commands (program.h) until the end of the input, and returns the exit status:
//
//   ready                          calls `join`, and answers once all have met. Then the thread is
//                                  bound to a processor of its own, if each rank can have one.
//   prepare COLLECTIVE BYTES TYPE  memory for it, and a first call whose outcome is checked
//   run SAMPLES CALLS              all ranks are told the same
//
// BYTES of a collective of a part for each rank are a multiple of the ranks' number of elements.
// Types: "float32", "float64", "float16", "bfloat16".
int serve_collectives(const std::function<std::unique_ptr<Collectives>()>& join);

}  // namespace hbm::bench
