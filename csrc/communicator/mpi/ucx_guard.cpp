#include "communicator/mpi/ucx_guard.h"

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {

using MpiSend = void* (*)(void* endpoint, const void* buffer, size_t count, uint64_t tag,
                          const void* parameters);

using Disconnect = void* (*)(void* endpoint);

std::atomic<MpiSend> real_send{nullptr};
std::atomic<MpiSend> real_sync_send{nullptr};
std::atomic<Disconnect> real_disconnect{nullptr};

// UCX returns a request, null for a complete one, or a status from -1 to -100.
void* without_error(void* request) {
  constexpr intptr_t kLastStatus = -100;
  return reinterpret_cast<uintptr_t>(request) >= static_cast<uintptr_t>(kLastStatus) ? nullptr
                                                                                     : request;
}

}  // namespace

// UCX's names and signatures (ucp/api/ucp.h, version 1 of its ABI).
extern "C" {

[[gnu::visibility("default")]] void* ucp_tag_send_nbx(void* endpoint, const void* buffer,
                                                      size_t count, uint64_t tag,
                                                      const void* parameters) {
  return without_error(real_send.load()(endpoint, buffer, count, tag, parameters));
}

[[gnu::visibility("default")]] void* ucp_tag_send_sync_nbx(void* endpoint, const void* buffer,
                                                           size_t count, uint64_t tag,
                                                           const void* parameters) {
  return without_error(real_sync_send.load()(endpoint, buffer, count, tag, parameters));
}

[[gnu::visibility("default")]] void* ucp_disconnect_nb(void* endpoint) {
  return without_error(real_disconnect.load()(endpoint));
}
}

namespace hbm::communicator::mpi {

void raise_ucx_guard() noexcept {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&ucp_tag_send_nbx), &self) == 0) return;
  // Makes the symbols of this library, which is loaded already, global. This is not possible if the
  // guards are linked into an executable; they then have no effect.
  dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
}

void aim_ucx_guard(void* library) noexcept {
  real_send = reinterpret_cast<MpiSend>(dlsym(library, "ucp_tag_send_nbx"));
  real_sync_send = reinterpret_cast<MpiSend>(dlsym(library, "ucp_tag_send_sync_nbx"));
  real_disconnect = reinterpret_cast<Disconnect>(dlsym(library, "ucp_disconnect_nb"));
}

}  // namespace hbm::communicator::mpi
