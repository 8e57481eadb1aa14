// Arrays of real numbers of any type, one element at a time, for the tests of csrc/reduce.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "reduce_reference.h"

namespace hbm::reference {

inline constexpr Dtype kReals[] = {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32,
                                   Dtype::kFloat64};

class Elements {
 public:
  Elements(size_t count, Dtype dtype)
      : count_(count), dtype_(dtype), bytes_(count * element_size(dtype)) {}

  // Random bits, and numbers near 1, whose sums are rounded more often than they are infinite.
  template <class Random>
  static Elements random(size_t count, Dtype dtype, Random& random) {
    Elements elements(count, dtype);
    for (std::byte& byte : elements.bytes_) byte = static_cast<std::byte>(random());
    for (size_t i = 0; i < count; i += 1 + random() % 3) {
      elements.set(i, std::uniform_real_distribution<>(-2, 2)(random));
    }
    return elements;
  }

  // So many bytes, that nothing may write to, come before the elements and as many behind them.
  void shift(size_t bytes) {
    constexpr std::byte guard{0xA5};
    bytes_.insert(bytes_.begin(), bytes, guard);
    bytes_.insert(bytes_.end(), bytes, guard);
    shift_ += bytes;
  }

  // Any real number is a double.
  double get(size_t i) const {
    switch (dtype_) {
      case Dtype::kFloat16:
        return kHalf.decode(reference::get<uint16_t>(data(), i));
      case Dtype::kBFloat16:
        return decode_bfloat16(reference::get<uint16_t>(data(), i));
      case Dtype::kFloat32:
        return reference::get<float>(data(), i);
      default:
        return reference::get<double>(data(), i);
    }
  }

  // Rounded to float32 first, if the type is not float64.
  void set(size_t i, double value) {
    const auto narrow = static_cast<float>(canonical(value));
    switch (dtype_) {
      case Dtype::kFloat16:
        return reference::set(data(), i, static_cast<uint16_t>(kHalf.encode(narrow)));
      case Dtype::kBFloat16:
        return reference::set(data(), i, encode_bfloat16(narrow));
      case Dtype::kFloat32:
        return reference::set(data(), i, narrow);
      default:
        return reference::set(data(), i, canonical(value));
    }
  }

  size_t count() const { return count_; }
  Dtype dtype() const { return dtype_; }
  std::byte* data() { return bytes_.data() + shift_; }
  const std::byte* data() const { return bytes_.data() + shift_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  size_t count_;
  Dtype dtype_;
  size_t shift_ = 0;
  std::vector<std::byte> bytes_;
};

}  // namespace hbm::reference
