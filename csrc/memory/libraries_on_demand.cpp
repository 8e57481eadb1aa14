// Opens the libraries at the first use: see libraries.h.
#include <dlfcn.h>

#include "base/descriptor_limit.h"
#include "base/error.h"
#include "base/this_module.h"
#include "memory/libraries.h"

namespace hbm::memory {
namespace {

const Libraries& open_libraries() {
  // There is a module _C for each release of PyTorch, in a directory of its own. All of them use
  // libhbm_memkind.so in the directory above.
  const std::string folder = directory_of_this_module();
  if (folder.empty()) {
    throw Error(ErrorKind::kUnavailable,
                "memkind cannot be loaded: the system does not know this module's directory");
  }
  const std::string file = folder + "../libhbm_memkind.so";
  void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const std::string why = std::string("memkind cannot be loaded: ") + dlerror();
    const std::string shortage = shortage_of_descriptors();
    throw Error(
        ErrorKind::kUnavailable,
        why + (shortage.empty()
                   ? "; install torch_hbmcomm again, or the named library (Debian: libmemkind0)"
                   : shortage));
  }
  const auto table_of = reinterpret_cast<const Libraries* (*)()>(dlsym(handle, Libraries::kEntry));
  const Libraries* const table = table_of != nullptr ? table_of() : nullptr;
  if (table == nullptr || table->abi != Libraries::kAbi) {
    dlclose(handle);
    throw Error(ErrorKind::kUnavailable,
                file + " is of another build than the module that wants it; install both again");
  }
  return *table;
}

}  // namespace

const Libraries& libraries() {
  static const Libraries& opened = open_libraries();  // if it throws, the next call retries
  return opened;
}

}  // namespace hbm::memory
