#include "communicator/mpi/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "communicator/mpi/ucx_guard.h"

namespace hbm::mpi {
namespace {

// Sonames of the MPICH ABI: upstream's, then Debian's.
constexpr std::array<const char*, 2> kSonames = {"libmpi.so.12", "libmpich.so.12"};

std::mutex search_mutex;
std::vector<std::string> search_path;

struct Found {
  void* handle = nullptr;
  std::string by;
};

Found find_library(std::string& tried) {
  const auto open = [&tried](const std::string& name, int flags) {
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL | flags);
    if (handle == nullptr && (flags & RTLD_NOLOAD) == 0) {
      tried += std::string("\n  ") + dlerror();
    }
    return handle;
  };
  if (const char* named = std::getenv("HBMCOMM_MPI_LIB"); named != nullptr && *named != '\0') {
    return {open(named, 0), "HBMCOMM_MPI_LIB"};
  }
  for (const char* soname : kSonames) {
    if (void* handle = open(soname, RTLD_NOLOAD)) return {handle, "already loaded"};
  }
  const std::lock_guard lock(search_mutex);
  for (const std::string& directory : search_path) {
    if (void* handle = open(directory + "/" + kSonames[0], 0)) return {handle, "PyPI's mpich"};
  }
  for (const char* soname : kSonames) {
    if (void* handle = open(soname, 0)) return {handle, "the system"};
  }
  return {};
}

template <typename Function>
void resolve(void* handle, const std::string& path, const char* name, Function& slot) {
  slot = reinterpret_cast<Function>(dlsym(handle, name));
  if (slot == nullptr) {
    throw Error(ErrorKind::kUnavailable, path + " has no function " + name +
                                             ": it is not an MPI-3.1 library of the MPICH ABI");
  }
}

// Open MPI's and MPI 5's standard ABI have other handle types: calling them would corrupt memory.
void require_mpich_abi(void* handle, const std::string& path) {
  if (dlsym(handle, "ompi_mpi_comm_world") != nullptr) {
    throw Error(ErrorKind::kUnavailable,
                path +
                    " is Open MPI, whose ABI differs; install MPICH (pip install mpich, or "
                    "apt install libmpich12) or name one in HBMCOMM_MPI_LIB");
  }
  if (dlsym(handle, "MPI_Abi_get_version") != nullptr &&
      path.find("mpi_abi") != std::string::npos) {
    throw Error(ErrorKind::kUnavailable,
                path +
                    " has the MPI 5 standard ABI; name the libmpi.so.12 beside it in "
                    "HBMCOMM_MPI_LIB");
  }
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  dlinfo(handle, RTLD_DI_LINKMAP, &map);
  return map->l_name;
}

// Two MPI libraries would both talk to the launcher, and hang.
void require_alone(void* handle, const std::string& path) {
  for (const char* soname : kSonames) {
    void* other = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
    if (other == nullptr) continue;
    dlclose(other);
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
                "libmpich12) or name its libmpi.so.12 in HBMCOMM_MPI_LIB. Tried:" +
                    tried);
  }
  MpiLibrary loaded;
  loaded.path = path_of(found.handle);
  loaded.found_by = found.by;
  require_mpich_abi(found.handle, loaded.path);
  require_alone(found.handle, loaded.path);
#define HBM_MPI_RESOLVE(name) resolve(found.handle, loaded.path, "MPI_" #name, loaded.name);
  HBM_MPI_FUNCTIONS(HBM_MPI_RESOLVE)
#undef HBM_MPI_RESOLVE

  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  loaded.Get_library_version(text.data(), &length);
  loaded.version = std::string(text.data(), static_cast<size_t>(length));
  loaded.version.resize(std::min(loaded.version.find('\n'), loaded.version.size()));
  for (char& c : loaded.version) c = c == '\t' ? ' ' : c;
  return loaded;
}

}  // namespace

void MpiLibrary::check(int code, const char* call) const {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  Error_string(code, text.data(), &length);
  throw Error(ErrorKind::kNetwork, std::string(call) + " failed: " +
                                       std::string(text.data(), static_cast<size_t>(length)));
}

void set_search_path(std::vector<std::string> directories) {
  const std::lock_guard lock(search_mutex);
  search_path = std::move(directories);
}

bool already_loaded() {
  for (const char* soname : kSonames) {
    if (void* handle = dlopen(soname, RTLD_NOW | RTLD_NOLOAD)) {
      dlclose(handle);
      return true;
    }
  }
  return false;
}

const MpiLibrary& library() {
  static const MpiLibrary loaded = load();  // tried again after a throw
  return loaded;
}

}  // namespace hbm::mpi
