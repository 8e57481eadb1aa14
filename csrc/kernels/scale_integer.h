// A 64-bit integer times a real factor, as scale() defines it, with the same bits on every
// processor: such an integer may lie beyond 2^53, where float64 no longer holds it.
#pragma once

#include <cstdint>

namespace hbm {

int64_t scale_integer(int64_t value, double factor) noexcept;
uint64_t scale_integer(uint64_t value, double factor) noexcept;

}  // namespace hbm
