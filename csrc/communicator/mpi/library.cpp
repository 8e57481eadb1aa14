#include "communicator/mpi/library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "communicator/mpi/ucx_guard.h"

namespace hbm::communicator::mpi {
namespace {

using Sonames = std::vector<const char*>;

// Best first: MPICH's ABI (upstream's name, Debian's name), then the standard ABI.
const Sonames kSonames = {"libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"};
// Open MPI 4 and 5: found only so that an error can name the library.
const Sonames kForeignSonames = {"libmpi.so.40"};

std::mutex search_mutex;
std::vector<std::string> search_path;

struct Found {
  void* handle = nullptr;
  std::string by;
};

void* open(const std::string& name, int flags) {
  return dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL | flags);
}

// Returns the MPI libraries that the process has already loaded. Loads none.
std::vector<void*> loaded_libraries() {
  std::vector<void*> loaded;
  for (const Sonames& sonames : {kSonames, kForeignSonames}) {
    for (const char* soname : sonames) {
      if (void* handle = open(soname, RTLD_NOLOAD)) loaded.push_back(handle);
    }
  }
  return loaded;
}

Found find_library(std::string& tried) {
  const auto try_to_open = [&tried](const std::string& name) {
    void* handle = open(name, 0);
    if (handle == nullptr) tried += std::string("\n  ") + dlerror();
    return handle;
  };
  if (const char* named = std::getenv("HBMCOMM_MPI_LIB"); named != nullptr && *named != '\0') {
    return {try_to_open(named), "HBMCOMM_MPI_LIB"};
  }
  const auto loaded = loaded_libraries();
  if (!loaded.empty()) return {loaded.front(), "already loaded"};
  const std::lock_guard lock(search_mutex);
  for (const Sonames& sonames : {kSonames, kForeignSonames}) {
    for (const std::string& directory : search_path) {
      for (const char* soname : sonames) {
        if (void* handle = try_to_open(directory + "/" + soname)) {
          return {handle, "beside this Python"};
        }
      }
    }
    for (const char* soname : sonames) {
      if (void* handle = try_to_open(soname)) return {handle, "the system"};
    }
  }
  return {};
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  dlinfo(handle, RTLD_DI_LINKMAP, &map);
  return map->l_name;
}

// Throws if the process has another MPI library: both would talk to the launcher, and hang.
void require_alone(void* handle, const std::string& path) {
  for (void* other : loaded_libraries()) {
    if (other == handle) continue;
    throw Error(ErrorKind::kUnavailable,
                path + " is to be used for MPI, but this process has loaded " + path_of(other) +
                    " already (mpi4py does so); have one MPI library alone: unset "
                    "HBMCOMM_MPI_LIB, or set it to the one that is loaded");
  }
}

MpiLibrary load() {
  std::string tried;
  raise_ucx_guard();
  const Found found = find_library(tried);
  if (found.handle != nullptr) aim_ucx_guard(found.handle);
  if (found.handle == nullptr) {
    throw Error(ErrorKind::kUnavailable,
                "no MPI library was found; install MPICH (pip install mpich, or apt install "
                "libmpich12) or name a library in HBMCOMM_MPI_LIB. Tried:" +
                    tried);
  }
  const std::string path = path_of(found.handle);
  std::unique_ptr<const Api> api = make_api({found.handle, path});
  require_alone(found.handle, path);
  const bool pmix =
      !api->version().starts_with("MPICH") || dlsym(found.handle, "PMIx_Init") != nullptr;
  return {path, found.by, pmix, std::move(api)};
}

}  // namespace

void set_search_path(std::vector<std::string> directories) {
  const std::lock_guard lock(search_mutex);
  search_path = std::move(directories);
}

bool already_loaded() { return !loaded_libraries().empty(); }

const MpiLibrary& library() {
  // If load() throws, the next call tries again. The object is never destroyed, because another
  // thread may call MPI while the process ends.
  static const MpiLibrary& loaded = *new MpiLibrary(load());
  return loaded;
}

}  // namespace hbm::communicator::mpi
