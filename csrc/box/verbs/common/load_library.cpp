#include "box/verbs/common/load_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/this_module.h"

namespace hbm::box::verbs::common {
namespace {

std::string path() {
  const char* named = std::getenv("HBMCOMM_VERBS_LIB");
  return named != nullptr && *named != '\0' ? named
                                            : directory_of_this_module() + "libhbm_verbs.so";
}

void* open_library(const std::string& file) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  throw Error(ErrorKind::kUnavailable,
              std::string("the verbs transport cannot be loaded: ") + dlerror() +
                  "; it needs libibverbs and librdmacm (Debian: librdmacm1, ibverbs-providers)");
}

}  // namespace

const void* load_table(const char* entry) {
  static std::mutex mutex;
  static void* library = nullptr;  // guarded by mutex
  const std::scoped_lock lock(mutex);
  const std::string file = path();
  void* const handle = library != nullptr ? library : open_library(file);
  const auto table_of = reinterpret_cast<const void* (*)()>(dlsym(handle, entry));
  const void* const table = table_of != nullptr ? table_of() : nullptr;
  if (table == nullptr || *static_cast<const uint32_t*>(table) != kAbi) {
    if (library == nullptr) dlclose(handle);
    throw Error(ErrorKind::kUnavailable,
                file + " is of another build than the module that wants it; install both again");
  }
  library = handle;
  return table;
}

}  // namespace hbm::box::verbs::common
