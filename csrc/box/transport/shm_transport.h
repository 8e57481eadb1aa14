// Whether shm is the transport between this process and a box that it has reached by another.
#pragma once

#include <string>

#include "box/protocol/protocol.h"

namespace hbm::transport {

// Empty: both run under one kernel, and the box's Unix socket answers here, which open_shm() takes
// to Joined::socket_path. Else why not, in words that complete "no shm: ...". The first kAlloc or
// kAttach proves the rest: its descriptor is mapped, or it fails.
//
// Threads: any. It does not block.
std::string why_no_shm(const smb::Joined& joined);

}  // namespace hbm::transport
