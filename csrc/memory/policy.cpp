#include "memory/policy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "memory/libraries.h"

namespace hbm::memory {
namespace {

constexpr std::array<const char*, kPolicyCount> kNames = {"preferred", "bind", "interleave", "ddr"};

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(" ") + name + "=" + value;
}

// Returns true on the first call. The flags are for conditions of the whole machine, which each
// process logs once, not once a heap.
bool first(std::atomic<bool>& said) { return !said.exchange(true, std::memory_order_relaxed); }
std::atomic<bool> said_absent{false};
std::atomic<bool> warned_of_absent{false};
std::atomic<bool> said_full{false};
std::atomic<bool> preferred_was_named{false};

// Warns only if the user has named the policy; most machines without HBM need no warning.
void say_absent(const std::string& message) {
  if (preferred_was_named.load(std::memory_order_relaxed)) {
    if (first(warned_of_absent)) log::notice(message);
  } else if (first(said_absent)) {
    log::info(message);
  }
}

// The variables by which memkind, or hwloc on its behalf, finds HBM.
constexpr std::array<const char*, 5> kHbmVariables = {"MEMKIND_HBW_NODES", "MEMKIND_HBW_THRESHOLD",
                                                      "HWLOC_XMLFILE", "HWLOC_SYNTHETIC",
                                                      "HWLOC_FSROOT"};

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// A copy of memkind's text for MEMKIND_ERROR_MEMTYPE_NOT_AVAILABLE, so that memkind need not be
// loaded for it.
constexpr const char* kNoSuchKind = "<memkind> Requested memory type is not available";

// Returns true if the variable is set and not empty. memkind would read an empty variable as a list
// of no nodes.
bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

// Returns may_have_hbm(). Removes empty variables first, because memkind reads them only once in a
// process.
bool prepare_memkind() {
  for (const char* name : kHbmVariables) {
    if (!is_set(name)) unsetenv(name);
  }
  return may_have_hbm();
}

int availability(Policy policy) {
  static const bool asks = prepare_memkind();
  if (policy != Policy::kDdr && !asks) return MEMKIND_ERROR_MEMTYPE_NOT_AVAILABLE;
  return libraries().check_available(kind_of(policy));
}

}  // namespace

bool may_have_hbm(const std::filesystem::path& nodes) {
  if (std::any_of(kHbmVariables.begin(), kHbmVariables.end(), is_set)) return true;
  std::string only;
  std::ifstream(nodes / "has_memory") >> only;
  if (!is_number(only)) return true;
  for (const char* access : {"access0", "access1"}) {
    std::error_code none;
    if (std::filesystem::exists(nodes / ("node" + only) / access, none)) return true;
  }
  return false;
}

Policy parse_policy(const std::string& name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Policy>(i);
  }
  throw Error(ErrorKind::kInvalid,
              "memory policy \"" + name + "\" is not one of preferred, bind, interleave and ddr");
}

const char* policy_name(Policy policy) noexcept { return kNames[static_cast<size_t>(policy)]; }

memkind_t kind_of(Policy policy) { return libraries().kind_of(policy); }

std::string memkind_message(int code) {
  if (code == MEMKIND_ERROR_MEMTYPE_NOT_AVAILABLE) return kNoSuchKind;
  char text[MEMKIND_ERROR_MESSAGE_SIZE];
  libraries().error_message(code, text, sizeof(text));
  return text;
}

std::string why_unavailable(Policy policy) {
  const int code = availability(policy);
  return code == MEMKIND_SUCCESS ? std::string() : memkind_message(code);
}

std::string why_unavailable_or_throw(Policy policy) {
  if (availability(policy) == MEMKIND_ERROR_ENVIRON) {
    throw Error(ErrorKind::kInvalid,
                "memkind rejects its environment:" + setting("MEMKIND_HBW_NODES") +
                    setting("MEMKIND_HBW_THRESHOLD") +
                    (is_set("MEMKIND_HBW_NODES")
                         ? "; this machine has NUMA nodes 0 to " +
                               std::to_string(libraries().numa_max_node()) +
                               ": name those that are HBM, as in 4-7, or unset the variable"
                         : std::string("; the threshold is a number of MiB/s")));
  }
  return why_unavailable(policy);
}

void named_by_user(Policy policy) {
  if (policy != Policy::kPreferred) return;
  preferred_was_named.store(true, std::memory_order_relaxed);
  // If absent HBM was logged only at level info, this call warns of it.
  if (said_absent.load(std::memory_order_relaxed)) comes_from_hbm(policy);
}

bool comes_from_hbm(Policy policy) {
  if (policy == Policy::kDdr) return false;
  const std::string reason = why_unavailable_or_throw(policy);
  if (reason.empty()) return true;
  if (policy != Policy::kPreferred) {
    throw Error(ErrorKind::kUnavailable,
                std::string("memory policy \"") + policy_name(policy) +
                    "\" needs high-bandwidth memory, and memkind finds none (" + reason +
                    "); use \"preferred\" or \"ddr\", or name the nodes in MEMKIND_HBW_NODES");
  }
  say_absent("memkind finds no high-bandwidth memory (" + reason +
             "): memory policy \"preferred\" uses DDR");
  return false;
}

void notice_spill(const std::string& reason) {
  if (first(said_full)) {
    log::notice(reason + "; using DDR, here and from now on whenever HBM is short");
  }
}

}  // namespace hbm::memory
