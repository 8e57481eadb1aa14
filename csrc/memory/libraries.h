// A table of the functions of memkind, hwloc and libnuma that hbm uses. The names of files and the
// texts of errors say "memkind" for all three libraries.
//
// Loading them costs a process 1 ms of processor time, and a rank of a machine without HBM needs
// none of them before its first tensor. So the Python module _C does not link them. It is built
// with libraries_on_demand.cpp, which opens libhbm_memkind.so at the first use; that library links
// them. All other binaries are built with libraries.cpp, and link them directly.
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
  // Raise this number with every change of the table or of a type in it. _C refuses a
  // libhbm_memkind.so with another number, because that library is of another build.
  static constexpr uint32_t kAbi = 2;
  static constexpr const char* kEntry = "hbm_memkind";  // this function returns the table

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

// If one of these fails, the type has changed: raise kAbi.
static_assert(sizeof(NodeInfo) == 40 + sizeof(std::string));
static_assert(sizeof(Topology) == 24 + 3 * sizeof(std::string) + 2 * sizeof(std::vector<int>));

// Throws Error(kUnavailable) with the cause if the libraries have to be loaded and cannot be
// loaded.
const Libraries& libraries();

}  // namespace hbm::memory
