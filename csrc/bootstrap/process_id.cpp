#include "bootstrap/process_id.h"

#include <array>
#include <cstdio>
#include <random>

#include "base/per_process.h"

namespace hbm::bootstrap {
namespace {

struct ProcessId {
  const std::string text = random_id();
};

}  // namespace

std::string random_id() {
  std::random_device device;
  std::array<char, 33> text{};
  std::snprintf(text.data(), text.size(), "%08x%08x%08x%08x", device(), device(), device(),
                device());
  return text.data();
}

const std::string& process_id() { return per_process<ProcessId>().text; }

}  // namespace hbm::bootstrap
