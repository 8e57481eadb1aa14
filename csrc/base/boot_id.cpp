#include "base/boot_id.h"

#include <fstream>

namespace hbm {

namespace {

std::string read_boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace

std::string boot_id() {
  static const std::string first = read_boot_id();
  return first.empty() ? read_boot_id() : first;  // empty: there was no descriptor left
}

}  // namespace hbm
