#include "kernels/error_feedback_passes.h"

#include "kernels/kernels.h"

namespace hbm::kernels {

const char* measured_sum_unsupported(Dtype residual, Dtype gradient) noexcept {
  if (kBaselineKernels.measure(residual, gradient, false) != nullptr) return nullptr;
  return "a residual of float32, bfloat16 or float16 takes gradients of these types, and one of "
         "float64 takes float64";
}

Measure measured_sum(const MeasuredSum& sum, Dtype residual, Dtype gradient, bool squares) {
  return chosen_kernels().measure(residual, gradient, squares)(sum);
}

const char* pack_unsupported(Dtype wire, Dtype residual) noexcept {
  if (kBaselineKernels.pack(wire, residual) != nullptr) return nullptr;
  return "float32, bfloat16 and float16 are sent as one another, and float64 is sent as float64 or "
         "float32";
}

void pack(const Packing& packing, Dtype wire, Dtype residual) {
  chosen_kernels().pack(wire, residual)(packing);
}

const char* unpack_unsupported(Dtype buffer, Dtype wire) noexcept {
  return pack_unsupported(wire, buffer);
}

bool unpack(void* buffer, const void* wire, size_t count, Dtype buffer_type, Dtype wire_type) {
  return chosen_kernels().unpack(buffer_type, wire_type)(buffer, wire, count);
}

}  // namespace hbm::kernels
