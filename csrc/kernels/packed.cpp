#include "kernels/packed.h"

#include "kernels/kernels.h"

namespace hbm {

const char* pack_unsupported(Dtype wire, Dtype cache) noexcept {
  if (kBaselineKernels.pack(wire, cache) != nullptr) return nullptr;
  return "float32, bfloat16 and float16 are sent as one another, and float64 is sent as float64 or "
         "float32";
}

void pack(const Packing& packing, Dtype wire, Dtype cache) {
  chosen_kernels().pack(wire, cache)(packing);
}

const char* unpack_unsupported(Dtype buffer, Dtype wire) noexcept {
  return pack_unsupported(wire, buffer);
}

bool unpack(void* buffer, const void* wire, size_t count, Dtype buffer_type, Dtype wire_type) {
  return chosen_kernels().unpack(buffer_type, wire_type)(buffer, wire, count);
}

}  // namespace hbm
