// A table of the functions that memkind, hwloc and libnuma are asked for. Files and errors name
// memkind for all three.
//
// Their load costs a process 1 ms of processor time, and a rank of a machine without HBM needs none
// of them before its first tensor. So _C does not link them: libraries_on_demand.cpp, which it has
// in place of libraries.cpp, opens libhbm_memkind.so, which does. Everything else links them.
//
// Threads: the functions may be called from any thread.
#pragma once

#include <memkind.h>

#include <cstdint>
#include <string>

#include "memory/cpu_binding.h"
#include "memory/policy.h"
#include "memory/topology.h"

namespace hbm::memory {

struct Libraries {
  // Both sides are of one build: it rises whenever this table, or a type in it, changes.
  static constexpr uint32_t kAbi = 1;
  static constexpr const char* kEntry = "hbm_memkind";  // returns the table of libhbm_memkind.so

  uint32_t abi;

  memkind_t (*kind_of)(Policy policy) noexcept;
  decltype(&memkind_check_available) check_available;
  decltype(&memkind_create_fixed) create_fixed;
  decltype(&memkind_destroy_kind) destroy_kind;
  decltype(&memkind_error_message) error_message;
  decltype(&memkind_free) free;
  decltype(&memkind_get_version) get_version;
  decltype(&memkind_posix_memalign) posix_memalign;
  int (*numa_max_node)();

  Topology (*discover)(const std::string& why_no_hbm);
  std::string (*bind)(BindMode mode, int local_rank, int local_size);
};

// Throws Error(kUnavailable) with the cause when they have to be loaded and cannot.
const Libraries& libraries();

}  // namespace hbm::memory
