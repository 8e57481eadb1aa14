#include "process_group/host_registration.h"

#include <c10/core/DeviceType.h>
#include <dlfcn.h>
#include <link.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace hbm::process_group {
namespace {

constexpr unsigned kForAllDevices = 1;  // cudaHostRegisterPortable, hipHostRegisterPortable
constexpr int kSuccess = 0;

struct Calls {
  std::string library;  // a part of the library's path; empty: any library
  std::string prefix;   // of the names of the functions
};

std::vector<Calls> calls_of(c10::DeviceType type) {
  if (type == c10::kPrivateUse1) return {{"", c10::get_privateuse1_backend()}};
  // PyTorch for ROCm calls its device CUDA.
  if (type == c10::kCUDA) return {{"libcudart", "cuda"}, {"libamdhip64", "hip"}};
  return {};
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        if (*info->dlpi_name != '\0') {
          static_cast<std::vector<std::string>*>(found)->emplace_back(info->dlpi_name);
        }
        return 0;
      },
      &paths);
  return paths;
}

void* find(const std::string& path, const std::string& name) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* const symbol = dlsym(library, name.c_str());
  dlclose(library);  // the library stays loaded, because the program uses it
  return symbol;
}

}  // namespace

const HostRegistration* HostRegistration::of(c10::DeviceType type) {
  static std::mutex mutex;
  static auto& known = *new std::map<c10::DeviceType, std::unique_ptr<HostRegistration>>;
  const std::lock_guard lock(mutex);
  const auto [entry, unknown] = known.try_emplace(type);
  if (!unknown) return entry->second.get();
  for (const Calls& calls : calls_of(type)) {
    for (const std::string& path : loaded_libraries()) {
      if (path.find(calls.library) == std::string::npos) continue;
      void* const add = find(path, calls.prefix + "HostRegister");
      void* const remove = find(path, calls.prefix + "HostUnregister");
      if (add == nullptr || remove == nullptr) continue;
      entry->second.reset(new HostRegistration(
          reinterpret_cast<Register>(add), reinterpret_cast<Unregister>(remove),
          reinterpret_cast<LastError>(find(path, calls.prefix + "GetLastError"))));
      return entry->second.get();
    }
  }
  return nullptr;
}

bool HostRegistration::add(void* block, size_t bytes) const noexcept {
  if (add_(block, bytes, kForAllDevices) == kSuccess) return true;
  if (take_error_ != nullptr) take_error_();
  return false;
}

void HostRegistration::remove(void* block) const noexcept {
  if (remove_(block) != kSuccess && take_error_ != nullptr) take_error_();
}

}  // namespace hbm::process_group
