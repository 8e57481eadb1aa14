// Unix sockets that are files in a directory shared by several processes: their location, and the
// removal of files left by killed processes.
//
// Threads: every function may be called from any thread.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace hbm {

// Returns HBMCOMM_SOCKET_DIR if it is set, else /dev/shm, because containers that share memory also
// share this directory.
std::string socket_directory();

// Returns true if the kernel refuses to connect a socket of this type (SOCK_STREAM, SOCK_SEQPACKET)
// to the file, because no process listens there. Then the process that made the file has ended, or
// does not listen yet.
bool refuses_calls(const std::filesystem::path& file, int type);

// Returns true if the file is older than a minute (kLongestSocketStart): the process that made it
// would listen by now.
bool past_start(const std::filesystem::path& file);

// Removes the files in `directory` for which `abandoned` returns true. Skips unreadable files and
// files that cannot be removed: they belong to other users.
void sweep_sockets(const std::string& directory,
                   const std::function<bool(const std::filesystem::path& file)>& abandoned);

}  // namespace hbm
