// The data that the ranks of a conversation exchange: tensors between guards, with patterns that
// every rank can compute. Plain loops compute the expected results.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "communicator/communicator.h"
#include "reduce_reference.h"

namespace hbm::communicator {

using Bytes = std::vector<std::byte>;

// Allocates memory for a tensor. Each kind of memory has such a function.
using Allocate = std::function<std::shared_ptr<std::byte>(size_t bytes)>;

inline std::shared_ptr<std::byte> private_memory(size_t bytes) {
  return {new std::byte[bytes], std::default_delete<std::byte[]>()};
}

// Elements in the middle of a block, with guards around them.
class Tensor {
 public:
  // The guard before the tensor is longer than the guard after it by `shift` elements. So `shift`
  // changes the tensor's alignment.
  Tensor(const Allocate& allocate, size_t count, Dtype dtype, size_t shift)
      : count_(count),
        bytes_(count * element_size(dtype)),
        before_(kGuardBytes + shift * element_size(dtype)),
        block_(allocate(before_ + bytes_ + kGuardBytes)) {
    std::memset(block_.get(), kGuard, before_ + bytes_ + kGuardBytes);
  }

  std::byte* data() const { return block_.get() + before_; }
  size_t count() const { return count_; }
  size_t bytes() const { return bytes_; }
  Source source() const { return {data(), count_}; }
  Sink sink() const { return {data(), count_}; }

  void set(const Bytes& content) const {
    if (bytes_ > 0) std::memcpy(data(), content.data(), bytes_);
  }
  bool holds(const Bytes& content) const {
    return std::equal(content.begin(), content.end(), data(), data() + bytes_) &&
           guards(block_.get(), before_) && guards(data() + bytes_, kGuardBytes);
  }
  bool untouched() const { return guards(block_.get(), before_ + bytes_ + kGuardBytes); }

 private:
  static constexpr size_t kGuardBytes = 48;
  static constexpr uint8_t kGuard = 0xA7;

  static bool guards(const std::byte* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      if (from[i] != std::byte{kGuard}) return false;
    }
    return true;
  }

  size_t count_;
  size_t bytes_;
  size_t before_;
  std::shared_ptr<std::byte> block_;
};

// The types of a conversation: every size of element, and every way to reduce.
inline constexpr std::array kSpokenDtypes = {
    Dtype::kFloat32,   Dtype::kUInt8, Dtype::kInt32,      Dtype::kFloat64,
    Dtype::kBFloat16,  Dtype::kInt64, Dtype::kFloat16,    Dtype::kBool,
    Dtype::kComplex64, Dtype::kInt16, Dtype::kComplex128, Dtype::kFloat8E4M3FN,
};

inline constexpr std::array kSpokenOps = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct,
                                          ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kBand,
                                          ReduceOp::kBor, ReduceOp::kBxor};

// Returns random elements. Real and complex types of float32 and float64 get numbers with absolute
// values between 0.5 and 2, whose sums and products round differently in another order. The
// elements of other types have random bits.
inline Bytes pattern(uint64_t seed, size_t count, Dtype dtype) {
  uint64_t state = seed * 0x9E3779B97F4A7C15 + 1;
  const auto next = [&state] {  // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  };
  const bool single = dtype == Dtype::kFloat32 || dtype == Dtype::kComplex64;
  const bool wide = dtype == Dtype::kFloat64 || dtype == Dtype::kComplex128;
  Bytes data(count * element_size(dtype));
  for (size_t i = 0; i < data.size(); i += sizeof(uint64_t)) {
    uint64_t word = next();
    if (single) word = (word & 0x80FFFFFF80FFFFFF) | 0x3F0000003F000000;
    if (wide) word = (word & 0x801FFFFFFFFFFFFF) | 0x3FE0000000000000;
    std::memcpy(data.data() + i, &word, std::min(sizeof word, data.size() - i));
  }
  return data;
}

inline Bytes reduced(const std::vector<Bytes>& inputs, size_t count, Dtype dtype, ReduceOp op,
                     size_t divisor) {
  std::vector<const void*> sources;
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes result(count * element_size(dtype));
  reference::reduce(result.data(), sources, count, dtype, op, divisor);
  return result;
}

// Returns the reduction of the inputs, in the order of ranks.
inline Bytes in_order(const std::vector<Bytes>& inputs, size_t count, Dtype dtype, ReduceOp op) {
  return reduced(inputs, count, dtype, op, inputs.size());
}

}  // namespace hbm::communicator
