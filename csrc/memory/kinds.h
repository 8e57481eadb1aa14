// Which memkind kind serves a policy, and whether memkind has it on this machine.
//
// memkind finds high-bandwidth nodes by MEMKIND_HBW_NODES when it is set, else by the firmware's
// bandwidth tables (HMAT) or, on Xeon Phi, by CPUID. Its verdict is taken once per process: changes
// to the environment after the first question have no effect.
//
// Threads: every function may be called from any thread.
#pragma once

#include <memkind.h>

#include <string>

#include "memory/policy.h"

namespace hbm::memory {

memkind_t kind_of(Policy policy) noexcept;

// What memkind has to say about an error code of its own.
std::string describe(int code);

// Empty when memkind can allocate from `kind` here, else its reason.
std::string why_unavailable(memkind_t kind);

// As why_unavailable(), but a setting that memkind rejects (MEMKIND_HBW_NODES naming nodes that do
// not exist) throws Error(kInvalid): it is a mistake to mend, not a machine without HBM.
std::string why_unavailable_or_throw(memkind_t kind);

// Whether blocks under the policy come from HBM. False for kDdr, and for kPreferred on a machine
// without HBM, which the log then says once a process.
// Throws Error(kUnavailable) when the policy needs HBM and the machine has none, and
// Error(kInvalid) as why_unavailable_or_throw().
bool comes_from_hbm(Policy policy);

// Says in the log, once a process, that HBM is short and that kPreferred turns to DDR.
void notice_spill(const std::string& reason);

}  // namespace hbm::memory
