#include <array>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "kernels/kernels.h"

namespace hbm::kernels {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"baseline", "avx2", "avx512f", "avx512",
                                                    "neon"};

struct Runnable {
  std::array<const Kernels*, kNames.size()> best_first{};
  size_t count = 0;

  Runnable() noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512f = avx2 && __builtin_cpu_supports("avx512f");
    const bool avx512 = avx512f && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) best_first[count++] = &kAvx512Kernels;
    if (avx512f && __builtin_cpu_supports("avx512cd")) best_first[count++] = &kAvx512fKernels;
    if (avx2) best_first[count++] = &kAvx2Kernels;
#endif
    best_first[count++] = &kBaselineKernels;
  }
};

}  // namespace

std::span<const Kernels* const> runnable_kernels() noexcept {
  static const Runnable runnable;
  return {runnable.best_first.data(), runnable.count};
}

const Kernels& kernels_named(std::string_view name) {
  const auto runnable = runnable_kernels();
  if (name.empty()) return *runnable.front();
  std::string here;
  for (const Kernels* kernels : runnable) {
    if (name == kernels->name) return *kernels;
    here += here.empty() ? "" : ", ";
    here += kernels->name;
  }
  const std::string asked = "HBMCOMM_ISA=" + std::string(name);
  for (std::string_view known : kNames) {
    if (name != known) continue;
    throw Error(ErrorKind::kUnavailable, asked + " names kernels that this processor cannot run; " +
                                             "unset it, or choose from: " + here);
  }
  throw Error(ErrorKind::kInvalid, asked + " names no kernels; unset it, or choose from: " + here);
}

const Kernels& chosen_kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* name = std::getenv("HBMCOMM_ISA");
    return kernels_named(name == nullptr ? "" : name);
  }();
  return chosen;
}

}  // namespace hbm::kernels
