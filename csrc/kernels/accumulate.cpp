#include "kernels/accumulate.h"

#include <algorithm>
#include <iterator>

#include "kernels/kernels.h"

namespace hbm::kernels {
namespace {

struct Pair {
  Dtype target, source;
  friend bool operator==(const Pair&, const Pair&) = default;
};

constexpr Pair kAccumulated[] = {
    {Dtype::kFloat32, Dtype::kFloat32},   {Dtype::kFloat32, Dtype::kFloat64},
    {Dtype::kFloat32, Dtype::kFloat16},   {Dtype::kFloat32, Dtype::kBFloat16},
    {Dtype::kFloat64, Dtype::kFloat64},   {Dtype::kFloat64, Dtype::kFloat32},
    {Dtype::kFloat16, Dtype::kFloat16},   {Dtype::kFloat16, Dtype::kFloat32},
    {Dtype::kBFloat16, Dtype::kBFloat16}, {Dtype::kBFloat16, Dtype::kFloat32},
    {Dtype::kInt32, Dtype::kInt32},       {Dtype::kInt64, Dtype::kInt64},
};

}  // namespace

const char* accumulate_unsupported(Dtype target, Dtype source) noexcept {
  if (std::ranges::find(kAccumulated, Pair{target, source}) != std::end(kAccumulated)) {
    return nullptr;
  }
  return "float32 takes float32, float64, float16 and bfloat16; float64, float16 and bfloat16 take "
         "their own type and float32; int32 and int64 take their own type";
}

void accumulate(void* target, const void* source, size_t count, const Formula& formula) {
  const Accumulate kernel =
      chosen_kernels().accumulate(formula.target, formula.source, formula.combine);
  kernel(target, source, count, formula.scale);
}

}  // namespace hbm::kernels
