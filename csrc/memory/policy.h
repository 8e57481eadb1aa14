// The memory policies: where memory comes from, and the memkind kind that serves each on this
// machine.
//
// memkind finds high-bandwidth nodes by MEMKIND_HBW_NODES when it is set, else by the firmware's
// bandwidth tables (HMAT) or, on Xeon Phi, by CPUID. Its verdict is taken once per process: changes
// to the environment after the first question have no effect.
//
// Threads: every function may be called from any thread.
#pragma once

#include <memkind.h>

#include <cstddef>
#include <filesystem>
#include <string>

namespace hbm::memory {

// The memory policies; each says what happens when high-bandwidth memory (HBM) is short or absent:
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

// The kind that allocates under the policy. Throws as libraries().
memkind_t kind_of(Policy policy);

// Whether memkind has to be asked for HBM, which costs a process 1 ms of processor time, since it
// reads the whole topology: not where `nodes`, the kernel's folder of NUMA nodes, has a single node
// with memory, of which the firmware tells no bandwidth, and no variable names nodes or another
// topology.
bool may_have_hbm(const std::filesystem::path& nodes = "/sys/devices/system/node");

// memkind's words for one of its error codes.
std::string memkind_message(int code);

// Empty when memkind can allocate under the policy here, else its reason.
std::string why_unavailable(Policy policy);

// Same as why_unavailable(), but a setting that memkind rejects (MEMKIND_HBW_NODES naming nodes
// that do not exist) throws Error(kInvalid): it is a mistake to mend, not a machine without HBM.
std::string why_unavailable_or_throw(Policy policy);

// The user has named the policy; it is not the default. That kPreferred finds no HBM is a warning
// then, and level info else.
void named_by_user(Policy policy);

// Whether blocks under the policy come from HBM. False for kDdr, and for kPreferred on a machine
// without HBM, which the log then says once a process: see named_by_user().
// Throws Error(kUnavailable) when the policy needs HBM and the machine has none, and
// Error(kInvalid) as why_unavailable_or_throw().
bool comes_from_hbm(Policy policy);

// Says in the log, once a process, that HBM is short and that kPreferred turns to DDR.
void notice_spill(const std::string& reason);

}  // namespace hbm::memory
