// Partial sums of integers in a type that holds them exactly, for means that are made in two
// stages: the sum of some ranks travels in the wider type, and the mean comes back in the tensor's
// own.
//
// Threads: all functions are pure and may run concurrently on disjoint destinations.
#pragma once

#include <cstddef>
#include <optional>

#include "base/dtype.h"

namespace hbm {

// Returns the type of the sum of `ranks` integers, nullopt for other types. The sum is twice as
// wide as its values. It is four times as wide for more than 256 values of 8 bits or 65,536 of 16.
std::optional<Dtype> partial_sum_type(Dtype dtype, size_t ranks) noexcept;

// dst[i] = src[i], of integer types of which `to` is the wider. They do not overlap.
void widen(void* dst, Dtype to, const void* src, Dtype from, size_t count);

// dst[i] = (srcs[0][i] + ... + srcs[n-1][i]) / divisor, as reduce() has AVG, where the means fit in
// `to`, the narrower of two integer types. `dst` may be one of the sources.
void average(void* dst, Dtype to, const void* const* srcs, size_t n, size_t count, Dtype from,
             size_t divisor);

}  // namespace hbm
