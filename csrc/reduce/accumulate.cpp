#include "reduce/accumulate.h"

#include "reduce/kernels.h"

namespace hbm {

const char* accumulate_unsupported(Dtype dtype) noexcept {
  if (kBaselineKernels.accumulate(dtype) != nullptr) return nullptr;
  return "it takes float32, float64, float16, bfloat16, int32 and int64";
}

void accumulate(void* target, const void* source, size_t count, Dtype dtype, double scale) {
  chosen_kernels().accumulate(dtype)(target, source, count, scale);
}

}  // namespace hbm
