#include "reduce/reduce.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "reduce/kernels.h"

namespace hbm {
namespace {

// Small, so that the reads of one block overlap the arithmetic of the one before.
constexpr size_t kBlockBytes = 4096;

struct alignas(64) Block {
  std::byte bytes[kBlockBytes];
};

Plan plan_for(const Kernels& kernels, Dtype dtype, ReduceOp op) {
  if (const char* reason = reduce_unsupported(dtype, op)) {
    throw Error(ErrorKind::kUnsupported, std::string(reduce_op_name(op)) + " of " +
                                             dtype_name(dtype) + " is not defined: " + reason);
  }
  return kernels.plan(dtype, op);
}

const Kernels& chosen_kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* name = std::getenv("HBMCOMM_ISA");
    return kernels_named(name == nullptr ? "" : name);
  }();
  return chosen;
}

// Calls body(first lane's offset in stored bytes, lanes) for each block of count elements.
template <class Body>
void for_blocks(const Plan& plan, size_t count, Body body) {
  const size_t total = count * plan.lanes;
  const size_t step = kBlockBytes / plan.wide;
  for (size_t first = 0; first < total; first += step) {
    body(first * plan.stored, std::min(step, total - first));
  }
}

}  // namespace

const char* reduce_isa() { return chosen_kernels().name; }

void reduce_with(const Kernels& kernels, void* dst, const void* const* srcs, size_t n, size_t count,
                 Dtype dtype, ReduceOp op, size_t divisor) {
  const Plan plan = plan_for(kernels, dtype, op);
  if (n == 1 && plan.divide == nullptr) {
    if (dst != srcs[0] && count != 0) std::memcpy(dst, srcs[0], count * element_size(dtype));
    return;
  }
  if (n == 2 && plan.pair != nullptr) {
    plan.pair(dst, srcs[0], srcs[1], count * plan.lanes);
    return;
  }
  Block accumulator;
  Block decoded;
  const bool finish = plan.divide != nullptr || plan.encode != nullptr;
  for_blocks(plan, count, [&](size_t offset, size_t lanes) {
    void* const out = static_cast<std::byte*>(dst) + offset;
    const auto source = [&](size_t k, Block& buffer) -> const void* {
      const void* in = static_cast<const std::byte*>(srcs[k]) + offset;
      if (plan.decode == nullptr) return in;
      plan.decode(&buffer, in, lanes);
      return &buffer;
    };
    const void* sum = source(0, accumulator);
    for (size_t k = 1; k < n; ++k) {
      void* const to = k + 1 < n || finish ? &accumulator : out;
      plan.combine(to, sum, source(k, decoded), lanes);
      sum = to;
    }
    if (plan.divide != nullptr) {
      void* const to = plan.encode != nullptr ? &accumulator : out;
      plan.divide(to, sum, lanes, divisor);
      sum = to;
    }
    if (plan.encode != nullptr) plan.encode(out, sum, lanes);
  });
}

void scale_with(const Kernels& kernels, void* dst, const void* src, size_t count, Dtype dtype,
                double factor) {
  const Plan plan = plan_for(kernels, dtype, ReduceOp::kPremulSum);
  Block wide;
  for_blocks(plan, count, [&](size_t offset, size_t lanes) {
    void* const out = static_cast<std::byte*>(dst) + offset;
    const void* const in = static_cast<const std::byte*>(src) + offset;
    if (plan.decode == nullptr) {
      plan.multiply(out, in, lanes, factor);
      return;
    }
    plan.decode(&wide, in, lanes);
    plan.multiply(&wide, &wide, lanes, factor);
    plan.encode(out, &wide, lanes);
  });
}

void reduce(void* dst, const void* const* srcs, size_t n, size_t count, Dtype dtype, ReduceOp op,
            size_t divisor) {
  reduce_with(chosen_kernels(), dst, srcs, n, count, dtype, op, divisor);
}

void scale(void* dst, const void* src, size_t count, Dtype dtype, double factor) {
  scale_with(chosen_kernels(), dst, src, count, dtype, factor);
}

}  // namespace hbm
