// Pinning memory that exists already, which PyTorch has no device-neutral interface for: the one
// place that knows the calls of devices. They are looked for in what the process has loaded, so
// nothing is linked, and a device that has none is served without.
//
//   CUDA           cudaHostRegister, cudaHostUnregister of libcudart
//   ROCm           hipHostRegister, hipHostUnregister of libamdhip64
//   PrivateUse1    NAMEHostRegister, NAMEHostUnregister of any library, for a device called NAME,
//                  with the arguments and the result of CUDA's
//
// A refusal is taken out of the device's record of errors (cudaGetLastError and its like), where
// PyTorch would find it after its next kernel.
//
// Threads: every function may be called from any thread.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace hbm {

class HostRegistration {
 public:
  // That of a device type; null where there are no such calls.
  static const HostRegistration* of(c10::DeviceType type);

  // Pins the pages of a block for all devices of the type; false if the device refuses. REQUIRES:
  // no page of it is pinned.
  bool add(void* block, size_t bytes) const noexcept;

  // REQUIRES: add(block, ...) was true; no copy uses the block.
  void remove(void* block) const noexcept;

 private:
  using Register = int (*)(void* block, size_t bytes, unsigned flags);
  using Unregister = int (*)(void* block);
  using LastError = int (*)();

  HostRegistration(Register add, Unregister remove, LastError take_error)
      : add_(add), remove_(remove), take_error_(take_error) {}

  const Register add_;
  const Unregister remove_;
  const LastError take_error_;  // null: the device has no record
};

}  // namespace hbm
