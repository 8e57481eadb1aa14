// Opens libhbm_verbs.so on demand, and finds the tables of functions that it exports: one for
// clients (box/verbs/client/library.h), one for servers (box/verbs/server/library.h).
//
// Only this library links libibverbs and librdmacm, so everything else runs on machines without
// them. The file is HBMCOMM_VERBS_LIB if this variable is set, else libhbm_verbs.so in the
// directory of the module that contains this code. Once loaded, the library is never closed.
//
// Threads: any.
#pragma once

#include <cstdint>

namespace hbm::box::verbs::common {

// The version of the interface, the first member of each table. It must rise whenever a type in the
// interface changes.
inline constexpr uint32_t kAbi = 3;

// Loads the library, and returns the table of its function `entry`. Throws Error(kUnavailable) with
// the cause if the library or rdma-core is missing, or the library is of another build; the next
// call tries again.
const void* load_table(const char* entry);

template <class Table>
const Table& load() {
  return *static_cast<const Table*>(load_table(Table::kEntry));
}

}  // namespace hbm::box::verbs::common
