#include "box/socket_path.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/descriptor.h"

namespace hbm::box {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "hbmcomm-box-";
constexpr const char* kSuffix = ".socket";
// A box that is about to listen has a file, too.
constexpr std::chrono::minutes kLongestStart{1};

std::string directory() {
  const char* chosen = std::getenv("HBMCOMM_SOCKET_DIR");
  return chosen != nullptr && *chosen != '\0' ? chosen : "/dev/shm";
}

bool refuses(const fs::path& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.native().size() >= sizeof name.sun_path) return false;
  std::strcpy(name.sun_path, path.c_str());
  const Descriptor caller(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return caller && connect(caller.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) != 0 &&
         errno == ECONNREFUSED;
}

bool abandoned(const fs::path& path) {
  std::error_code failure;
  const auto made = fs::last_write_time(path, failure);
  return !failure && fs::file_time_type::clock::now() - made > kLongestStart && refuses(path);
}

// What cannot be read or removed belongs to somebody else.
void sweep(const std::string& where) {
  std::error_code failure;
  for (fs::directory_iterator file(where, failure), end; !failure && file != end;
       file.increment(failure)) {
    const std::string name = file->path().filename();
    if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) continue;
    if (abandoned(file->path())) unlink(file->path().c_str());
  }
}

}  // namespace

std::string new_socket_path() {
  static std::atomic<unsigned> boxes{0};
  const std::string where = directory();
  sweep(where);
  return where + "/" + kPrefix + std::to_string(getpid()) + "-" + std::to_string(boxes++) + kSuffix;
}

}  // namespace hbm::box
