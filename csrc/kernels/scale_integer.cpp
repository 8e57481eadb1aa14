#include "kernels/scale_integer.h"

#include <cmath>
#include <limits>

namespace hbm {
namespace {

constexpr int kMantissa = 53;  // bits of a float64
constexpr uint64_t kExact = uint64_t{1} << kMantissa;

// trunc(magnitude * factor), at most `limit`, for factor >= 0.
uint64_t scale_magnitude(uint64_t magnitude, double factor, uint64_t limit) noexcept {
  if (magnitude <= kExact || !std::isfinite(factor)) {
    const double product = static_cast<double>(magnitude) * factor;
    if (std::isnan(product)) return 0;
    return product < static_cast<double>(limit) ? static_cast<uint64_t>(product) : limit;
  }
  int exponent;
  const double fraction = std::frexp(factor, &exponent);  // 0, or in [0.5, 1)
  const auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, kMantissa));
  const unsigned __int128 product = static_cast<unsigned __int128>(magnitude) * mantissa;
  const int shift = kMantissa - exponent;
  if (product == 0 || shift >= 128) return 0;
  if (shift <= 0) return limit;  // the product alone is beyond 2^105
  const unsigned __int128 scaled = product >> shift;
  return scaled < limit ? static_cast<uint64_t>(scaled) : limit;
}

}  // namespace

int64_t scale_integer(int64_t value, double factor) noexcept {
  constexpr uint64_t kHighest = std::numeric_limits<int64_t>::max();
  const bool negative = (value < 0) != std::signbit(factor);
  const uint64_t magnitude = value < 0 ? -static_cast<uint64_t>(value) : value;
  const uint64_t scaled = scale_magnitude(magnitude, std::fabs(factor), kHighest + negative);
  return static_cast<int64_t>(negative ? -scaled : scaled);
}

uint64_t scale_integer(uint64_t value, double factor) noexcept {
  constexpr uint64_t kHighest = std::numeric_limits<uint64_t>::max();
  if (!(factor > 0)) return 0;
  return scale_magnitude(value, factor, kHighest);
}

}  // namespace hbm
