// Tells the other ranks that a rank failed before its rendezvous.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm::bootstrap {

// Aborts the group formation. All ranks then throw Error(kUnavailable) with the text "rank 2 of ...
// cannot take part: ", followed by `why`. `rank` may be outside of the group. `members` are the
// ranks' numbers in the job. Errors of the store are logged.
void fail_early(std::shared_ptr<KeyValue> store, int rank, const std::vector<uint64_t>& members,
                const std::string& group, const std::string& why);

}  // namespace hbm::bootstrap
