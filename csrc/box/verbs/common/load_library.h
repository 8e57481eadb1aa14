// Opens libhbm_verbs.so on demand, and finds the tables of functions that it exports: one for
// clients (box/verbs/client/library.h) and one for servers (box/verbs/server/library.h).
//
// The library alone links libibverbs and librdmacm, so that a machine without them can run all the
// rest. It is looked for beside the module that contains this code, or where HBMCOMM_VERBS_LIB
// says. Once open it stays.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstdint>

namespace hbm::verbs {

// The first member of each table. Both sides are of one build: it rises whenever one of the types
// that cross the border changes.
inline constexpr uint32_t kAbi = 3;

// Loads the library, and returns what its function `entry` returns. Throws Error(kUnavailable) with
// the cause when the library or rdma-core under it is missing, or is of another build; the next
// call looks again.
const void* load_table(const char* entry);

template <class Table>
const Table& load() {
  return *static_cast<const Table*>(load_table(Table::kEntry));
}

}  // namespace hbm::verbs
