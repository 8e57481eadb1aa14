#include "base/socket_files.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "base/descriptor.h"
#include "base/tuning.h"

namespace hbm {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string socket_directory() {
  const char* chosen = std::getenv("HBMCOMM_SOCKET_DIR");
  return chosen != nullptr && *chosen != '\0' ? chosen : "/dev/shm";
}

bool refuses_calls(const fs::path& file, int type) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (file.native().size() >= sizeof name.sun_path) return false;
  std::strcpy(name.sun_path, file.c_str());
  const Descriptor caller(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return caller && connect(caller.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) != 0 &&
         errno == ECONNREFUSED;
}

bool past_start(const fs::path& file) {
  std::error_code failure;
  const auto made = fs::last_write_time(file, failure);
  return !failure && fs::file_time_type::clock::now() - made > kLongestSocketStart;
}

void sweep_sockets(const std::string& directory,
                   const std::function<bool(const fs::path& file)>& abandoned) {
  std::error_code failure;
  for (fs::directory_iterator file(directory, failure), end; !failure && file != end;
       file.increment(failure)) {
    if (abandoned(file->path())) unlink(file->path().c_str());
  }
}

}  // namespace hbm
