// The other passes of layer dropping: what is sent of a cache goes to the wire, and what came by
// the wire goes to the gradients.
//
// Computed in float32 (float64 if one of the types is float64), the factors rounded to that type
// first. Each operation is rounded on its own, to nearest even; NaNs are canonical, as in reduce.h.
//
// Threads: all functions are pure and may run concurrently on disjoint memory.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm {

struct Packing {
  void* wire;
  void* cache;
  size_t count;        // elements
  double factor = 1;   // of the cache, on the wire
  double inverse = 1;  // of what lies on the wire, in the cache
};

// Null if pack() takes this pair of types, else which it does take, as a clause.
const char* pack_unsupported(Dtype wire, Dtype cache) noexcept;

// wire = factor * cache. If the wire's elements have fewer bytes, the cache keeps what was rounded
// off, cache - inverse * wire, or 0 where the wire is infinite or NaN; else it stays as it is.
// REQUIRES: pack_unsupported(wire, cache) == nullptr; disjoint arrays. None needs alignment.
// Throws as reduce_isa() does (reduce.h).
void pack(const Packing& packing, Dtype wire, Dtype cache);

// Null if unpack() takes this pair of types, else which it does take, as a clause.
const char* unpack_unsupported(Dtype buffer, Dtype wire) noexcept;

// Converts `count` elements, and returns whether all on the wire are finite.
// REQUIRES: unpack_unsupported(buffer, wire) == nullptr; `buffer` may be `wire` if the types are
// equal, and does not overlap it otherwise. None needs alignment.
// Throws as reduce_isa() does (reduce.h).
bool unpack(void* buffer, const void* wire, size_t count, Dtype buffer_type, Dtype wire_type);

}  // namespace hbm
