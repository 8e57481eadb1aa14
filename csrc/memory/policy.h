// Where memory comes from.
#pragma once

#include <cstddef>
#include <string>

namespace hbm::memory {

// What happens when high-bandwidth memory (HBM) is short or absent is part of each policy:
enum class Policy {
  kPreferred,   // the closest HBM node; DDR when it is full or absent (said once in the log)
  kBind,        // the closest HBM node; an error when it is full or absent
  kInterleave,  // pages round-robin over the HBM nodes; an error when they are full or absent
  kDdr,         // ordinary memory
};
inline constexpr size_t kPolicyCount = 4;

// Throws Error(kInvalid), naming the four choices, for any other name.
Policy parse_policy(const std::string& name);
const char* policy_name(Policy policy) noexcept;

}  // namespace hbm::memory
