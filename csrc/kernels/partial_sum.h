// Partial sums of integers, in a type that holds them exactly, for means that are computed in two
// stages. The sum of some ranks is sent in the wider type, and the mean is returned in the tensor's
// own type.
//
// Threads: all functions are pure and may run concurrently on disjoint destinations.
#pragma once

#include <cstddef>
#include <optional>

#include "base/dtype.h"

namespace hbm::kernels {

// Returns the type of the sum of `ranks` integers of type `dtype`; nullopt if `dtype` is no integer
// type. The sum is twice as wide as its values. It is four times as wide for more than 256 values
// of 8 bits, or more than 65,536 values of 16 bits.
std::optional<Dtype> partial_sum_type(Dtype dtype, size_t ranks) noexcept;

// dst[i] = src[i], of integer types; `to` is the wider type. The arrays do not overlap.
void widen(void* dst, Dtype to, const void* src, Dtype from, size_t count);

// dst[i] = (srcs[0][i] + ... + srcs[n-1][i]) / divisor, as AVG in reduce(). `from` is the type of
// the sums. `to`, a narrower type, is the type of the means. `dst` may be one of the sources.
void average(void* dst, Dtype to, const void* const* srcs, size_t n, size_t count, Dtype from,
             size_t divisor);

}  // namespace hbm::kernels
