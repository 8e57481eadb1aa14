// Pins existing memory, for which PyTorch has no device-neutral interface. Only this file knows the
// functions by which devices pin memory. It searches the loaded libraries for these functions, so
// it links no library. A device without such functions works without pinned segments.
//
//   CUDA           cudaHostRegister, cudaHostUnregister of libcudart
//   ROCm           hipHostRegister, hipHostUnregister of libamdhip64
//   PrivateUse1    NAMEHostRegister, NAMEHostUnregister of any library, for a device called NAME,
//                  with the arguments and the result of CUDA's functions
//
// If the device refuses a call, add() and remove() clear the device's last error (cudaGetLastError
// and its counterparts). Otherwise PyTorch would find the error after its next kernel.
//
// Threads: every function may be called from any thread.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace hbm::process_group {

class HostRegistration {
 public:
  // Returns the functions for a device type; null if there are none.
  static const HostRegistration* of(c10::DeviceType type);

  // Pins the pages of a block for all devices of the type. Returns false if the device refuses.
  // REQUIRES: no page of the block is pinned.
  bool add(void* block, size_t bytes) const noexcept;

  // Unpins a block. REQUIRES: add(block, ...) returned true; no copy uses the block.
  void remove(void* block) const noexcept;

 private:
  using Register = int (*)(void* block, size_t bytes, unsigned flags);
  using Unregister = int (*)(void* block);
  using LastError = int (*)();

  HostRegistration(Register add, Unregister remove, LastError take_error)
      : add_(add), remove_(remove), take_error_(take_error) {}

  const Register add_;
  const Unregister remove_;
  const LastError take_error_;  // null: the device has no such function
};

}  // namespace hbm::process_group
