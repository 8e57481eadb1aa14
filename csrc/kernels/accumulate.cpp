#include "kernels/accumulate.h"

#include "kernels/kernels.h"

namespace hbm {

void accumulate(void* target, const void* source, size_t count, const Formula& formula) {
  const Accumulate kernel =
      chosen_kernels().accumulate(formula.target, formula.source, formula.combine);
  kernel(target, source, count, formula.scale);
}

}  // namespace hbm
