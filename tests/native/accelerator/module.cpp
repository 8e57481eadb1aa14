// The test accelerator's interface to PyTorch: the device type PrivateUse1, and a Python module for
// tests.
#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "memory.h"
#include "streams.h"

namespace late {
namespace {

std::atomic<bool> lost{false};
std::atomic<bool> pins{true};
std::atomic<bool> tells_of_captures{true};

c10::Device device_at(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Event = std::shared_ptr<Moment>;

  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device());
    set_current_stream(stream);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = late::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    late::block(stream, *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    TORCH_CHECK(!lost, "the test accelerator is lost");
    return (*static_cast<Event*>(event))->reached();
  }
  void synchronizeEvent(void* event) const override { synchronize(**static_cast<Event*>(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return late::record(stream)->reached();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize(device); }
  // Without `override`, because the base class of older releases of PyTorch lacks this function.
  bool isStreamCapturing(const c10::Stream& stream) const {
    TORCH_CHECK(tells_of_captures, "the test accelerator does not tell of captures");
    return is_capturing(stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(pins, "the test accelerator has no pinned memory");
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::OptionalDeviceGuard guard(storage.device());
    c10::DataPtr block = device_allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) device_allocator()->copy_data(block.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(block));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    return device_at(static_cast<c10::DeviceIndex>(device_of(address)));
  }
};

c10::Stream current() { return current_stream(device_at(current_device())); }

}  // namespace
}  // namespace late

PYBIND11_MODULE(late_accelerator, module) {
  namespace py = pybind11;
  using namespace late;  // NOLINT
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(c10::kPrivateUse1, device_allocator());

  module.def("is_available", [] { return true; });
  module.def("is_initialized", [] { return true; });
  module.def("device_count", [] { return kDevices; });
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device",
             [](int device) { set_current_device(static_cast<c10::DeviceIndex>(device)); });
  module.def(
      "synchronize", [] { synchronize(current()); }, py::call_guard<py::gil_scoped_release>());
  module.def("synchronizations", &synchronizations);
  module.def("set_longest_delay",
             [](int64_t us) { set_longest_delay(std::chrono::microseconds(us)); });
  module.def("hold", [] { hold(current()); });
  module.def("release", [] { release(current()); });
  py::enum_<Direction>(module, "Direction")
      .value("TO_HOST", Direction::kToHost)
      .value("TO_DEVICE", Direction::kToDevice);
  module.def("copies", &copies);
  module.def("allow_copies", &allow_copies);
  module.def("set_capturing", [](bool capturing) { set_capturing(current(), capturing); });
  module.def("tell_of_captures", [](bool tell) { tells_of_captures = tell; });
  module.def("lose", [] { lost = true; });
  module.def("fail_pinned", &fail_pinned);
  // From now on this accelerator has no pinned memory. Tests call it before the first operation on
  // a device.
  module.def("pin_nothing", [] {
    pins = false;
    fail_pinned(true);
  });
  module.def("pinned_under", &pinned_under);
  module.def("pinned_counts", [] {
    const PinnedCounts counts = pinned_counts();
    return py::dict(py::arg("in_use") = counts.in_use, py::arg("allocated") = counts.allocated,
                    py::arg("freed_in_copy") = counts.freed_in_copy,
                    py::arg("reused_in_copy") = counts.reused_in_copy,
                    py::arg("registered") = counts.registered);
  });
}
