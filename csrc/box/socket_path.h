// Where a box puts its Unix socket when it is not told.
//
// Threads: any.
#pragma once

#include <string>

namespace hbm::box {

// A name for this process's next box, in HBMCOMM_SOCKET_DIR or /dev/shm, which containers with
// shared memory between them share. Sockets there that killed boxes have left are removed.
std::string new_socket_path();

}  // namespace hbm::box
