#include "base/boot_id.h"

#include <fstream>

namespace hbm {

std::string boot_id() {
  static const std::string id = [] {
    std::string read;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> read;
    return read;
  }();
  return id;
}

}  // namespace hbm
