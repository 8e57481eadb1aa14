// A rank that fails before it could meet the others.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm::bootstrap {

// Ends the attempt to form the group on all ranks, which then throw Error(kUnavailable): "rank 2 of
// ... cannot take part: " and `why`. `rank` may be none of the group's. `members` are the ranks'
// numbers in the job. An error of the store is logged.
void fail_early(std::shared_ptr<KeyValue> store, int rank, const std::vector<uint64_t>& members,
                const std::string& group, const std::string& why);

}  // namespace hbm::bootstrap
