// Opens libhbm_verbs.so (library.h) on demand.
//
// It is looked for beside the module that contains this code, or where HBMCOMM_VERBS_LIB says. Once
// open it stays.
//
// Threads: every function may be called from any thread.
#pragma once

#include <string>

#include "box/verbs/common/library.h"

namespace hbm::verbs {

// Throws Error(kUnavailable) with the cause when the library or rdma-core under it is missing; the
// next call looks again.
const Library& library();

// Why verbs cannot be used towards `host`, in words; empty: it can. An empty host: on this host at
// all.
std::string why_not(const std::string& host, uint16_t port);

}  // namespace hbm::verbs
