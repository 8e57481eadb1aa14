#include "kernels/partial_sum.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/reduce.h"
#include "kernels/tuning.h"

namespace hbm::kernels {
namespace {

template <class Visit>
void with_integer(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::kUInt8:  // NOLINT(bugprone-branch-clone): visit() is a template
      return visit(uint8_t());
    case Dtype::kInt8:
      return visit(int8_t());
    case Dtype::kUInt16:
      return visit(uint16_t());
    case Dtype::kInt16:
      return visit(int16_t());
    case Dtype::kUInt32:
      return visit(uint32_t());
    case Dtype::kInt32:
      return visit(int32_t());
    case Dtype::kUInt64:
      return visit(uint64_t());
    case Dtype::kInt64:
      return visit(int64_t());
    case Dtype::kUInt128:
      return visit(static_cast<unsigned __int128>(0));
    case Dtype::kInt128:
      return visit(static_cast<__int128>(0));
    default:
      return;
  }
}

// The arrays do not overlap, and need no alignment.
template <class To, class From>
void convert(std::byte* __restrict dst, const std::byte* __restrict src, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, src + i * sizeof value, sizeof value);
    // NOLINTNEXTLINE(bugprone-signed-char-misuse): int8_t is a number here
    const auto converted = static_cast<To>(value);
    std::memcpy(dst + i * sizeof converted, &converted, sizeof converted);
  }
}

void convert(void* dst, Dtype to, const void* src, Dtype from, size_t count) {
  with_integer(to, [&]<class To>(To) {
    with_integer(from, [&]<class From>(From) {
      convert<To, From>(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), count);
    });
  });
}

}  // namespace

std::optional<Dtype> partial_sum_type(Dtype dtype, size_t ranks) noexcept {
  const bool few = ranks <= 256;
  const bool some = ranks <= 65'536;
  switch (dtype) {
    case Dtype::kUInt8:
      return few ? Dtype::kUInt16 : Dtype::kUInt32;
    case Dtype::kInt8:
      return few ? Dtype::kInt16 : Dtype::kInt32;
    case Dtype::kUInt16:
      return some ? Dtype::kUInt32 : Dtype::kUInt64;
    case Dtype::kInt16:
      return some ? Dtype::kInt32 : Dtype::kInt64;
    case Dtype::kUInt32:
      return Dtype::kUInt64;
    case Dtype::kInt32:
      return Dtype::kInt64;
    case Dtype::kUInt64:
      return Dtype::kUInt128;
    case Dtype::kInt64:
      return Dtype::kInt128;
    default:
      return std::nullopt;
  }
}

void widen(void* dst, Dtype to, const void* src, Dtype from, size_t count) {
  convert(dst, to, src, from, count);
}

// Averages from the front, slice by slice. `dst` may be a source, because a stored slice is shorter
// than the source's slice, so it overwrites no unread sum.
void average(void* dst, Dtype to, const void* const* srcs, size_t n, size_t count, Dtype from,
             size_t divisor) {
  alignas(64) std::array<std::byte, kAverageStepBytes> means;
  const size_t slice = kAverageStepBytes / element_size(from);
  std::vector<const void*> sources(n);
  for (size_t first = 0; first < count; first += slice) {
    const size_t some = std::min(slice, count - first);
    for (size_t i = 0; i < n; ++i) {
      sources[i] = static_cast<const std::byte*>(srcs[i]) + first * element_size(from);
    }
    reduce(means.data(), sources.data(), n, some, from, ReduceOp::kAvg, divisor);
    convert(static_cast<std::byte*>(dst) + first * element_size(to), to, means.data(), from, some);
  }
}

}  // namespace hbm::kernels
