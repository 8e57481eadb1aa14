// The memory policies. A policy names the source of memory; this file also finds the memkind kind
// that serves the policy on this machine.
//
// memkind finds high-bandwidth nodes by MEMKIND_HBW_NODES if it is set, else by the firmware's
// bandwidth tables (HMAT) or, on Xeon Phi, by CPUID. memkind decides once per process, so changes
// of the environment after the first query have no effect.
//
// Threads: every function may be called from any thread.
#pragma once

#include <memkind.h>

#include <cstddef>
#include <filesystem>
#include <string>

namespace hbm::memory {

// The memory policies. Each defines the behaviour when high-bandwidth memory (HBM) is short or
// absent.
enum class Policy {
  kPreferred,   // the closest HBM node; DDR when it is full or absent (logged once)
  kBind,        // the closest HBM node; an error when it is full or absent
  kInterleave,  // pages round-robin over the HBM nodes; an error when they are full or absent
  kDdr,         // ordinary memory
};
inline constexpr size_t kPolicyCount = 4;

// Parses "preferred", "bind", "interleave" or "ddr". Throws Error(kInvalid), naming these four, for
// another name.
Policy parse_policy(const std::string& name);
const char* policy_name(Policy policy) noexcept;

// Returns the memkind kind of the policy. Throws as libraries().
memkind_t kind_of(Policy policy);

// Returns true if the machine may have HBM, so that memkind has to be asked. Asking costs a process
// 1 ms of processor time, because memkind reads the whole topology. Returns false if three things
// hold: a single node has memory, the firmware reports no bandwidth for it, and no environment
// variable names nodes or another topology. `nodes` is the kernel's directory of NUMA nodes.
bool may_have_hbm(const std::filesystem::path& nodes = "/sys/devices/system/node");

// Returns memkind's text for one of its error codes.
std::string memkind_message(int code);

// Returns memkind's reason if memkind cannot allocate under the policy here, else an empty string.
std::string why_unavailable(Policy policy);

// Returns why_unavailable(), but throws Error(kInvalid) for a setting that memkind rejects
// (MEMKIND_HBW_NODES with absent nodes), because the user can fix the setting.
std::string why_unavailable_or_throw(Policy policy);

// Records that the user has named the policy, so it is not the default. After this call the log
// warns if kPreferred finds no HBM. Without this call the log reports this only at level info.
void named_by_user(Policy policy);

// Returns true if blocks under the policy are HBM. Returns false for kDdr, and for kPreferred on a
// machine without HBM, which is logged once a process (named_by_user()). Throws Error(kUnavailable)
// if the policy needs HBM and the machine has none, and Error(kInvalid) as
// why_unavailable_or_throw().
bool comes_from_hbm(Policy policy);

// Logs, once a process, that HBM is short and that kPreferred uses DDR.
void notice_spill(const std::string& reason);

}  // namespace hbm::memory
