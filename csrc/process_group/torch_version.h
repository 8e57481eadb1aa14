// Differences between the releases of PyTorch that hbm supports, 2.11 to 2.15. Only this file
// compares versions: all other code is written for the newest release, and this file declares the
// names that an older release lacks.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11,
              "torch_hbmcomm needs PyTorch 2.11 or later");

namespace hbm::process_group {

// c10d::PreMulSumSupplement, by its name up to 2.12, which newer releases still accept.
using PremulSupplement = c10d::NCCLPreMulSumSupplement;

#if TORCH_VERSION_MINOR >= 12
inline constexpr auto kReduceScatterCoalesced = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
inline constexpr auto kReduceScatterCoalesced = c10d::OpType::COALESCED;
#endif

#if TORCH_VERSION_MINOR >= 14
inline constexpr auto kAllgatherCoalesced = c10d::OpType::ALLGATHER_INTO_TENSOR_COALESCED;
#else
inline constexpr auto kAllgatherCoalesced = c10d::OpType::COALESCED;
#endif

// Returns true if work queued on `stream` is recorded for a graph instead of executed. Returns
// false in a release without DeviceGuardImplInterface::isStreamCapturing(). Release 2.12 throws for
// a device that does not implement it.
template <class Guard>
bool capturing(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    try {
      return guard.isStreamCapturing(stream);
    } catch (const c10::Error&) {
      return false;
    }
  }
  return false;
}

// The options of a backend. c10d clones them for groups derived from other groups.
struct OptionsBase : c10d::Backend::Options {
  using Options::Options;
#if TORCH_VERSION_MINOR < 14
  virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const = 0;
#endif
};

// c10d::Backend with every virtual function that hbm implements.
class BackendBase : public c10d::Backend {
 public:
  using Backend::Backend;
#if TORCH_VERSION_MINOR < 12
  virtual std::unordered_map<std::string, uint64_t> getMemoryStats() = 0;
#endif
#if TORCH_VERSION_MINOR < 14
  virtual c10::intrusive_ptr<c10d::Work> gather_single(at::Tensor& output, at::Tensor& input,
                                                       const c10d::GatherOptions& opts) = 0;
#endif
};

}  // namespace hbm::process_group
