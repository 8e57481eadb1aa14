// Arrays of real numbers of any type, for the tests of csrc/kernels. The tests access one element
// at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "reduce_reference.h"

namespace hbm::reference {

inline constexpr Dtype kReals[] = {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32,
                                   Dtype::kFloat64};

// Returns element `i` as a double, which holds every number of every real type.
inline double get_real(const void* from, size_t i, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return kHalf.decode(get<uint16_t>(from, i));
    case Dtype::kBFloat16:
      return decode_bfloat16(get<uint16_t>(from, i));
    case Dtype::kFloat32:
      return get<float>(from, i);
    default:
      return get<double>(from, i);
  }
}

// Stores a number that was computed in the wider type of a target and a source.
inline void set_real(void* to, size_t i, Dtype dtype, double value) {
  const auto narrow = static_cast<float>(canonical(value));
  switch (dtype) {
    case Dtype::kFloat16:
      return set(to, i, static_cast<uint16_t>(kHalf.encode(narrow)));
    case Dtype::kBFloat16:
      return set(to, i, encode_bfloat16(narrow));
    case Dtype::kFloat32:
      return set(to, i, narrow);
    default:
      return set(to, i, canonical(value));
  }
}

class Elements {
 public:
  Elements(size_t count, Dtype dtype)
      : count_(count), dtype_(dtype), bytes_(count * element_size(dtype)) {}

  // Returns elements of random bits. About half of them are numbers between -2 and 2, whose sums
  // are often rounded and never infinite.
  template <class Random>
  static Elements random(size_t count, Dtype dtype, Random& random) {
    Elements elements(count, dtype);
    for (std::byte& byte : elements.bytes_) byte = static_cast<std::byte>(random());
    for (size_t i = 0; i < count; i += 1 + random() % 3) {
      elements.set(i, std::uniform_real_distribution<>(-2, 2)(random));
    }
    return elements;
  }

  // Moves the elements: adds `bytes` guard bytes before and after them.
  void shift(size_t bytes) {
    constexpr std::byte guard{0xA5};
    bytes_.insert(bytes_.begin(), bytes, guard);
    bytes_.insert(bytes_.end(), bytes, guard);
    shift_ += bytes;
  }

  double get(size_t i) const { return get_real(data(), i, dtype_); }
  void set(size_t i, double value) { set_real(data(), i, dtype_, value); }

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
