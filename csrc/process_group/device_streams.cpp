#include "process_group/device_streams.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "process_group/chunks.h"
#include "process_group/device_transfer.h"
#include "process_group/options.h"
#include "process_group/torch_version.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

bool can_pin(c10::Device device) {
  try {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(device.type());
    return hooks.getPinnedMemoryAllocator() != nullptr;
  } catch (const c10::Error& error) {
    log::warn("tensors on " + device.str() + " are copied by way of pageable memory, which is " +
              "slower: the device has no pinned memory (" + error.what_without_backtrace() + ")");
    return false;
  }
}

size_t chunk_bytes_from_environment() {
  constexpr auto* kName = "HBMCOMM_DEVICE_CHUNK_BYTES";
  const char* const text = std::getenv(kName);
  if (text == nullptr || *text == '\0') return kDeviceChunkBytes;
  const int64_t bytes = parse_bytes(text, kName);
  if (bytes < kLeastDeviceChunkBytes) {
    throw Error(ErrorKind::kInvalid, std::string(kName) + "=" + text + ": the least is " +
                                         std::to_string(kLeastDeviceChunkBytes));
  }
  return static_cast<size_t>(bytes);
}

}  // namespace

DeviceStreams::DeviceStreams(c10::Device device,
                             const std::shared_ptr<memory::SharedSegment>& segment)
    : device_(device),
      guard_(device.type()),
      to_host_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      to_device_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      host_copies_(HostCopyMemory::of(segment, device.type())),
      pinned_(can_pin(device)),
      chunk_bytes_(chunk_bytes_from_environment()) {}

void DeviceStreams::require_no_capture(const char* operation) const {
  if (!capturing(guard_, current())) return;
  throw Error(ErrorKind::kUnsupported,
              std::string(operation) + ": the current stream of " + device_.str() +
                  " records a graph, which cannot hold what the host does in an operation of hbm; "
                  "leave it out of the capture");
}

c10::Event DeviceStreams::record(const c10::Stream& stream) const {
  c10::Event event(device_.type());
  event.record(stream);
  return event;
}

void DeviceStreams::keep_for(const at::Tensor& tensor, const c10::Stream& stream) const {
  guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

at::Tensor DeviceStreams::host_copy(const at::Tensor& tensor) const {
  return host_tensor(tensor.numel(), tensor.options()).view(tensor.sizes());
}

at::Tensor DeviceStreams::host_tensor(int64_t elements, const at::TensorOptions& like) const {
  const c10::DeviceGuard guard(device_);  // pinning makes a context on the current device
  if (host_copies_ != nullptr) {
    at::Tensor host_copy = host_copies_->take(elements, c10::typeMetaToScalarType(like.dtype()));
    if (host_copy.defined()) return host_copy;
  }
  try {
    return at::empty({elements}, like.device(c10::kCPU).pinned_memory(pinned_));
  } catch (const c10::Error& error) {
    throw Error(ErrorKind::kExhausted, "no memory on the host, pinned for " + device_.str() +
                                           ", for a copy of " + std::to_string(elements) +
                                           " elements of " + std::string(like.dtype().name()) +
                                           ": " + error.what_without_backtrace());
  }
}

bool DeviceStreams::is_result_read_by(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies,
                                      std::shared_ptr<const DeviceResult> result) {
  const std::lock_guard lock(mutex_);
  std::erase_if(unfinished_, [](const auto& earlier) { return earlier->finished(); });
  const bool read = std::any_of(unfinished_.begin(), unfinished_.end(),
                                [&](const auto& earlier) { return earlier->is_read_by(copies); });
  unfinished_.push_back(std::move(result));
  return read;
}

}  // namespace hbm::process_group
