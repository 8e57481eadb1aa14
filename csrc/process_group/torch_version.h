// Differences between the releases of PyTorch that hbm supports, 2.11 to 2.15. Only this file
// compares versions: all other code is written for the newest release, and this file declares the
// names that an older release lacks.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

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

#if TORCH_VERSION_MINOR >= 14
using c10d::AbortHook;
using c10d::PutOptions;
using c10d::ReconfigureHandle;
using c10d::ReconfigureOptions;
using c10d::SignalOptions;
using c10d::WaitSignalOptions;
using c10d::Window;
using c10d::WindowAccessType;
using c10d::WindowAttr;
#else
using AbortHook = std::function<void()>;
using ReconfigureHandle = std::string;
struct ReconfigureOptions {
  int64_t uuid = 0;
  std::variant<std::unordered_set<ReconfigureHandle>, std::vector<ReconfigureHandle>> handles;
  std::optional<std::chrono::milliseconds> timeout;
};
struct PutOptions {
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};
using SignalOptions = PutOptions;
using WaitSignalOptions = PutOptions;
enum class WindowAccessType : uint8_t { UNIFIED, SEPARATE };
struct WindowAttr {
  WindowAccessType access_type = WindowAccessType::UNIFIED;
};
// No program reaches the windows of these releases, because c10d has no function for them.
class Window : public torch::CustomClassHolder {
 public:
  virtual void tensor_register(const at::Tensor& tensor, bool owning) = 0;
  virtual void tensor_deregister() = 0;
  virtual c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t to, int64_t offset,
                                             bool async, const PutOptions& opts) = 0;
  virtual at::Tensor map_remote_tensor(int64_t rank) = 0;
  virtual c10::intrusive_ptr<c10d::Work> signal(int64_t to, bool async,
                                                const SignalOptions& opts) = 0;
  virtual c10::intrusive_ptr<c10d::Work> wait_signal(int64_t from, bool async,
                                                     const WaitSignalOptions& opts) = 0;
  virtual WindowAttr get_attr(int64_t rank) = 0;
};
#endif

// `Allocator` with every virtual function that hbm implements. Its parameter is c10d's
// SymmetricMemoryAllocator, whose header only one file of hbm includes.
template <class Allocator>
class SymmetricAllocatorBase : public Allocator {
#if TORCH_VERSION_MINOR < 13
 public:
  virtual bool has_allocation(void* ptr) = 0;
#endif
};

// The options of a backend. c10d clones them for groups derived from other groups.
struct OptionsBase : c10d::Backend::Options {
  using Options::Options;
#if TORCH_VERSION_MINOR < 14
  virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const = 0;
  bool enable_reconfigure = false;
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
  virtual void registerAbortHook(int64_t hook_id, AbortHook hook) = 0;
  virtual void unregisterAbortHook(int64_t hook_id) = 0;
  virtual bool supportsReconfigure() const = 0;
  virtual ReconfigureHandle get_reconfigure_handle() const = 0;
  virtual c10::intrusive_ptr<c10d::Work> reconfigure(const ReconfigureOptions& opts) = 0;
  virtual bool supportsWindow() const = 0;
  virtual c10::intrusive_ptr<Window> new_window(const std::optional<at::Tensor>& tensor) = 0;
#endif
#if TORCH_VERSION_MINOR < 15
  virtual bool supportsAbortHooks() const = 0;
#endif

 protected:
  // Changes this rank's number and the group's size. REQUIRES: supportsReconfigure().
  void set_membership([[maybe_unused]] int rank, [[maybe_unused]] int size) {
#if TORCH_VERSION_MINOR >= 14
    rank_ = rank;
    size_ = size;
#endif
  }
};

}  // namespace hbm::process_group
