#include "kernels/reduce.h"

#include <string>

#include "base/error.h"
#include "kernels/copy.h"
#include "kernels/kernels.h"

namespace hbm {
namespace {

Plan plan_for(const Kernels& kernels, Dtype dtype, ReduceOp op) {
  if (const char* reason = reduce_unsupported(dtype, op)) {
    throw Error(ErrorKind::kUnsupported, std::string(reduce_op_name(op)) + " of " +
                                             dtype_name(dtype) + " is not defined: " + reason);
  }
  return kernels.plan(dtype, op);
}

}  // namespace

const char* reduce_isa() { return chosen_kernels().name; }

void reduce_with(const Kernels& kernels, void* const* dsts, size_t m, const void* const* srcs,
                 size_t n, size_t count, Dtype dtype, ReduceOp op, size_t divisor) {
  const Plan plan = plan_for(kernels, dtype, op);
  if (n == 1 && op != ReduceOp::kAvg) {
    for (size_t k = 0; k < m; ++k) {
      if (dsts[k] != srcs[0]) copy_bytes(dsts[k], srcs[0], count * element_size(dtype));
    }
    return;
  }
  plan.fold({dsts, m, srcs, n, count * plan.lanes}, divisor);
}

void scale_with(const Kernels& kernels, void* dst, const void* src, size_t count, Dtype dtype,
                double factor) {
  const Plan plan = plan_for(kernels, dtype, ReduceOp::kPremulSum);
  plan.scale(dst, src, count * plan.lanes, factor);
}

void reduce(void* dst, const void* const* srcs, size_t n, size_t count, Dtype dtype, ReduceOp op,
            size_t divisor) {
  reduce_to(&dst, 1, srcs, n, count, dtype, op, divisor);
}

void reduce_to(void* const* dsts, size_t m, const void* const* srcs, size_t n, size_t count,
               Dtype dtype, ReduceOp op, size_t divisor) {
  reduce_with(chosen_kernels(), dsts, m, srcs, n, count, dtype, op, divisor);
}

void scale(void* dst, const void* src, size_t count, Dtype dtype, double factor) {
  scale_with(chosen_kernels(), dst, src, count, dtype, factor);
}

}  // namespace hbm
