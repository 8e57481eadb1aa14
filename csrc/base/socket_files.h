// Unix sockets that are files in a directory which several processes use: where they lie, and the
// removal of those that killed processes left there.
//
// Threads: every function may be called from any thread.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace hbm {

// HBMCOMM_SOCKET_DIR, or /dev/shm, which containers with shared memory between them share.
std::string socket_directory();

// Whether nobody listens at the file, with a socket of this type (SOCK_STREAM, SOCK_SEQPACKET): its
// process has ended, or does not listen yet.
bool refuses_calls(const std::filesystem::path& file, int type);

// Whether the file is so old, a minute, that the process that made it would listen by now.
bool past_start(const std::filesystem::path& file);

// Removes the files in `directory` that `abandoned` says. Passes over what cannot be read or
// removed: it belongs to somebody else.
void sweep_sockets(const std::string& directory,
                   const std::function<bool(const std::filesystem::path& file)>& abandoned);

}  // namespace hbm
