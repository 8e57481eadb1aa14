// Open files that are kept for those who come in: each segment has one, and a client that asked for
// segments until none is left would lock all others out.
//
// Threads: any.
#pragma once

namespace hbm::box {

// Throws Error(kExhausted) when a new segment's descriptor would be one of the last: of 64 or an
// eighth of the limit (RLIMIT_NOFILE), whichever is more.
void require_descriptor();

}  // namespace hbm::box
