// Opens the libraries when they are first asked: see libraries.h.
#include <dlfcn.h>

#include "base/descriptor_limit.h"
#include "base/error.h"
#include "base/this_module.h"
#include "memory/libraries.h"

namespace hbm::memory {
namespace {

const Libraries& open_libraries() {
  // The modules for each PyTorch have folders of their own, beside the library for all.
  const std::string folder = folder_of_this_module();
  if (folder.empty()) {
    throw Error(ErrorKind::kUnavailable,
                "memkind cannot be loaded: the system does not tell where this module lies");
  }
  const std::string file = folder + "../libhbm_memkind.so";
  void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const std::string why = std::string("memkind cannot be loaded: ") + dlerror();
    const std::string shortage = shortage_of_descriptors();
    throw Error(ErrorKind::kUnavailable,
                why + (shortage.empty()
                           ? "; install torch_hbmcomm again, or what it names (Debian: libmemkind0)"
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
  static const Libraries& opened = open_libraries();  // tried again if that throws
  return opened;
}

}  // namespace hbm::memory
