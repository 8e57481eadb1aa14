#include "memory/policy.h"

#include <array>

#include "base/error.h"

namespace hbm::memory {
namespace {

constexpr std::array<const char*, kPolicyCount> kNames = {"preferred", "bind", "interleave", "ddr"};

}  // namespace

Policy parse_policy(const std::string& name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Policy>(i);
  }
  throw Error(ErrorKind::kInvalid,
              "memory policy \"" + name + "\" is not one of preferred, bind, interleave and ddr");
}

const char* policy_name(Policy policy) noexcept { return kNames[static_cast<size_t>(policy)]; }

}  // namespace hbm::memory
