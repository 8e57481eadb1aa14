// The reference for csrc/kernels/reduce.h, written in the slow and obvious way. It handles one
// element at a time. It converts narrow floats by the definition of their formats, and searches for
// the nearest code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/dtype.h"

namespace hbm::reference {

// A floating-point format of at most 16 bits, as the table of its finite magnitudes.
class Format {
 public:
  enum class Overflow { kInfinity, kSaturate, kNan };

  Format(int exponent_bits, int mantissa_bits, int bias, Overflow overflow)
      : sign_(1u << (exponent_bits + mantissa_bits)), overflow_(overflow) {
    const uint32_t ones = (1u << exponent_bits) - 1;
    for (uint32_t code = 0; code < sign_; ++code) {
      const uint32_t exponent = code >> mantissa_bits;
      const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
      if (overflow == Overflow::kInfinity && exponent == ones) break;
      if (overflow == Overflow::kSaturate && code == sign_ - 1) break;
      const double fraction = std::ldexp(mantissa, -mantissa_bits) + (exponent != 0);
      magnitudes_.push_back(std::ldexp(fraction, std::max<int>(exponent, 1) - bias));
    }
  }

  float decode(uint32_t code) const {
    const uint32_t magnitude = code & (sign_ - 1);
    const float sign = code & sign_ ? -1 : 1;
    if (overflow_ == Overflow::kNan && code == sign_) return kNan;
    if (magnitude < magnitudes_.size()) return sign * static_cast<float>(magnitudes_[magnitude]);
    const bool infinite = overflow_ == Overflow::kInfinity && magnitude == magnitudes_.size();
    return infinite ? sign * std::numeric_limits<float>::infinity() : kNan;
  }

  uint32_t encode(float value) const {
    const uint32_t sign = std::signbit(value) ? sign_ : 0;
    if (std::isnan(value)) return nan() | sign;
    const double magnitude = std::fabs(value);
    const size_t codes = magnitudes_.size();
    const double last_step = magnitudes_[codes - 1] - magnitudes_[codes - 2];
    // Without saturation, the largest magnitude has an odd code. So a number halfway between this
    // magnitude and the next multiple of the step is rounded up, and overflows.
    if (overflow_ == Overflow::kSaturate ? magnitude >= magnitudes_.back()
                                         : magnitude >= magnitudes_.back() + last_step / 2) {
      if (overflow_ == Overflow::kSaturate) return (codes - 1) | sign;
      return overflow_ == Overflow::kNan ? nan() : codes | sign;
    }
    const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
    auto code = static_cast<uint32_t>(std::min<size_t>(above - magnitudes_.begin(), codes - 1));
    if (code > 0) {
      const double up = magnitudes_[code] - magnitude;
      const double down = magnitude - magnitudes_[code - 1];
      if (down < up || (down == up && code % 2 == 1)) --code;
    }
    return overflow_ == Overflow::kNan && code == 0 ? 0 : code | sign;
  }

  uint32_t codes() const { return 2 * sign_; }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  uint32_t nan() const {
    if (overflow_ == Overflow::kNan) return sign_;
    if (sign_ == 0x8000) return 0x7E00;
    return 0x7F;
  }

  uint32_t sign_;
  Overflow overflow_;
  std::vector<double> magnitudes_;  // by code
};

inline const Format kHalf{5, 10, 15, Format::Overflow::kInfinity};
inline const Format kE5M2{5, 2, 15, Format::Overflow::kInfinity};
inline const Format kE4M3FN{4, 3, 7, Format::Overflow::kSaturate};
inline const Format kE5M2FNUZ{5, 2, 16, Format::Overflow::kNan};
inline const Format kE4M3FNUZ{4, 3, 8, Format::Overflow::kNan};

inline uint16_t encode_bfloat16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rest = bits & 0xFFFF;
  const uint32_t kept = bits >> 16;
  return static_cast<uint16_t>(kept + (rest > 0x8000 || (rest == 0x8000 && kept % 2 == 1)));
}

inline float decode_bfloat16(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T get(const void* from, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void set(void* to, size_t i, T value) {
  std::memcpy(static_cast<char*>(to) + i * sizeof(T), &value, sizeof(T));
}

struct Call {
  const std::vector<const void*>& sources;
  size_t count;
  ReduceOp op;
  size_t divisor;
};

template <class T>
T combine_integers(T a, T b, ReduceOp op) {
  using U = std::make_unsigned_t<T>;
  const uint64_t x = static_cast<U>(a), y = static_cast<U>(b);
  switch (op) {
    case ReduceOp::kProduct:
      return static_cast<T>(x * y);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kBand:
      return static_cast<T>(x & y);
    case ReduceOp::kBor:
      return static_cast<T>(x | y);
    case ReduceOp::kBxor:
      return static_cast<T>(x ^ y);
    default:
      return static_cast<T>(x + y);
  }
}

template <class T>
void reduce_integers(void* dst, const Call& call) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  for (size_t i = 0; i < call.count; ++i) {
    if (call.op == ReduceOp::kAvg) {
      Wide sum = 0;
      for (const void* source : call.sources) sum += get<T>(source, i);
      set(dst, i, static_cast<T>(sum / static_cast<Wide>(call.divisor)));
      continue;
    }
    T value = get<T>(call.sources[0], i);
    for (size_t k = 1; k < call.sources.size(); ++k) {
      value = combine_integers(value, get<T>(call.sources[k], i), call.op);
    }
    set(dst, i, value);
  }
}

inline void reduce_bools(void* dst, const Call& call) {
  for (size_t i = 0; i < call.count; ++i) {
    bool value = get<uint8_t>(call.sources[0], i) != 0;
    for (size_t k = 1; k < call.sources.size(); ++k) {
      const bool next = get<uint8_t>(call.sources[k], i) != 0;
      if (call.op == ReduceOp::kBxor) {
        value = value != next;
      } else if (call.op == ReduceOp::kProduct || call.op == ReduceOp::kMin ||
                 call.op == ReduceOp::kBand) {
        value = value && next;
      } else {
        value = value || next;
      }
    }
    set<uint8_t>(dst, i, value);
  }
}

template <class T>
T canonical(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <class T>
T combine_reals(T a, T b, ReduceOp op) {
  const bool nan = std::isnan(a) || std::isnan(b);
  switch (op) {
    case ReduceOp::kProduct:
      return canonical(a * b);
    case ReduceOp::kMin:
      return nan ? canonical<T>(NAN) : a < b ? a : b;
    case ReduceOp::kMax:
      return nan ? canonical<T>(NAN) : a > b ? a : b;
    default:
      return canonical(a + b);
  }
}

// Stored: the type in memory; T: the accumulator's type; lanes: 2 for complex numbers.
template <class Stored, class T, class Decode, class Encode>
void reduce_floats(void* dst, const Call& call, size_t lanes, Decode decode, Encode encode) {
  for (size_t i = 0; i < call.count * lanes; i += lanes) {
    T value[2];
    for (size_t part = 0; part < lanes; ++part) {
      value[part] = decode(get<Stored>(call.sources[0], i + part));
    }
    for (size_t k = 1; k < call.sources.size(); ++k) {
      T next[2];
      for (size_t part = 0; part < lanes; ++part) {
        next[part] = decode(get<Stored>(call.sources[k], i + part));
      }
      if (lanes == 2 && call.op == ReduceOp::kProduct) {
        // volatile, so that each product is rounded before it is added.
        const volatile T rr = value[0] * next[0], ii = value[1] * next[1];
        const volatile T ri = value[0] * next[1], ir = value[1] * next[0];
        value[0] = canonical<T>(rr - ii);
        value[1] = canonical<T>(ri + ir);
        continue;
      }
      for (size_t part = 0; part < lanes; ++part) {
        value[part] = combine_reals(value[part], next[part], call.op);
      }
    }
    for (size_t part = 0; part < lanes; ++part) {
      if (call.op == ReduceOp::kAvg)
        value[part] = canonical(value[part] / static_cast<T>(call.divisor));
      set<Stored>(dst, i + part, encode(value[part]));
    }
  }
}

template <class T>
void reduce_plain(void* dst, const Call& call, size_t lanes) {
  const auto same = [](T value) { return value; };
  reduce_floats<T, T>(dst, call, lanes, same, same);
}

template <class Code>
void reduce_coded(void* dst, const Call& call, size_t lanes, const Format& format) {
  reduce_floats<Code, float>(
      dst, call, lanes, [&](Code code) { return format.decode(code); },
      [&](float value) { return static_cast<Code>(format.encode(value)); });
}

inline void reduce(void* dst, const std::vector<const void*>& sources, size_t count, Dtype dtype,
                   ReduceOp op, size_t divisor) {
  const Call call{sources, count, op, divisor};
  if (sources.size() == 1 && op != ReduceOp::kAvg) {
    if (count != 0) std::memcpy(dst, sources[0], count * element_size(dtype));
    return;
  }
  switch (dtype) {
    case Dtype::kBool:
      return reduce_bools(dst, call);
    case Dtype::kUInt8:
      return reduce_integers<uint8_t>(dst, call);
    case Dtype::kInt8:
      return reduce_integers<int8_t>(dst, call);
    case Dtype::kUInt16:
      return reduce_integers<uint16_t>(dst, call);
    case Dtype::kInt16:
      return reduce_integers<int16_t>(dst, call);
    case Dtype::kUInt32:
      return reduce_integers<uint32_t>(dst, call);
    case Dtype::kInt32:
      return reduce_integers<int32_t>(dst, call);
    case Dtype::kUInt64:
      return reduce_integers<uint64_t>(dst, call);
    case Dtype::kInt64:
      return reduce_integers<int64_t>(dst, call);
    case Dtype::kFloat16:
      return reduce_coded<uint16_t>(dst, call, 1, kHalf);
    case Dtype::kBFloat16:
      return reduce_floats<uint16_t, float>(dst, call, 1, decode_bfloat16, encode_bfloat16);
    case Dtype::kFloat32:
      return reduce_plain<float>(dst, call, 1);
    case Dtype::kFloat64:
      return reduce_plain<double>(dst, call, 1);
    case Dtype::kComplex32:
      return reduce_coded<uint16_t>(dst, call, 2, kHalf);
    case Dtype::kComplex64:
      return reduce_plain<float>(dst, call, 2);
    case Dtype::kComplex128:
      return reduce_plain<double>(dst, call, 2);
    case Dtype::kFloat8E5M2:
      return reduce_coded<uint8_t>(dst, call, 1, kE5M2);
    case Dtype::kFloat8E4M3FN:
      return reduce_coded<uint8_t>(dst, call, 1, kE4M3FN);
    case Dtype::kFloat8E5M2FNUZ:
      return reduce_coded<uint8_t>(dst, call, 1, kE5M2FNUZ);
    case Dtype::kFloat8E4M3FNUZ:
      return reduce_coded<uint8_t>(dst, call, 1, kE4M3FNUZ);
    default:
      break;
  }
}

}  // namespace hbm::reference
