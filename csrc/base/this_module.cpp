#include "base/this_module.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

namespace hbm {

std::string directory_of_this_module() {
  Dl_info info{};
  link_map* map = nullptr;
  const auto here = reinterpret_cast<const void*>(&directory_of_this_module);
  if (dladdr1(here, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0) return {};
  // If this code is linked into the program, dladdr1() gives an empty name.
  const std::string module =
      *map->l_name != '\0' ? map->l_name : std::filesystem::read_symlink("/proc/self/exe").string();
  return module.substr(0, module.rfind('/') + 1);
}

}  // namespace hbm
