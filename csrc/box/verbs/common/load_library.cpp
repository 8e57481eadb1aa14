#include "box/verbs/common/load_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "base/error.h"

namespace hbm::verbs {
namespace {

// "libhbm_verbs.so" in the folder of the module that this function is in.
std::string beside_this_module() {
  Dl_info info{};
  link_map* map = nullptr;
  const auto here = reinterpret_cast<const void*>(&beside_this_module);
  if (dladdr1(here, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0) {
    return "libhbm_verbs.so";
  }
  // The program itself has no name there.
  const std::string module =
      *map->l_name != '\0' ? map->l_name : std::filesystem::read_symlink("/proc/self/exe").string();
  return module.substr(0, module.rfind('/') + 1) + "libhbm_verbs.so";
}

std::string path() {
  const char* named = std::getenv("HBMCOMM_VERBS_LIB");
  return named != nullptr && *named != '\0' ? named : beside_this_module();
}

const Library* open_library() {
  const std::string file = path();
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(ErrorKind::kUnavailable,
                std::string("the verbs transport cannot be loaded: ") + dlerror() +
                    "; it needs libibverbs and librdmacm (Debian: librdmacm1, ibverbs-providers)");
  }
  const auto entry = reinterpret_cast<Entry>(dlsym(handle, kEntry));
  const Library* library = entry != nullptr ? entry() : nullptr;
  if (library == nullptr || library->abi != kAbi) {
    dlclose(handle);
    throw Error(ErrorKind::kUnavailable,
                file + " is of another build than the module that wants it; install both again");
  }
  return library;
}

}  // namespace

const Library& library() {
  static std::mutex mutex;
  static const Library* opened = nullptr;  // guarded by mutex
  const std::scoped_lock lock(mutex);
  if (opened == nullptr) opened = open_library();
  return *opened;
}

std::string why_not(const std::string& host, uint16_t port) {
  try {
    return library().why_not(host, port);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace hbm::verbs
