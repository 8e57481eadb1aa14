#include "memory/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "memory/limits.h"

namespace hbm::memory {

Descriptor make_shared_file(const std::string& name) {
  Descriptor file(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) {
    const int error = errno;
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot make shared memory: memfd_create: ") + std::strerror(error) +
                    (error == EMFILE ? "; raise the limit of open files (ulimit -n)" : ""));
  }
  if (fchmod(file.get(), S_IRUSR | S_IWUSR) != 0) {
    throw Error(
        ErrorKind::kUnavailable,
        std::string("cannot keep shared memory from other users: fchmod: ") + std::strerror(errno));
  }
  return file;
}

void set_size(const Descriptor& file, uint64_t bytes) {
  // The kernel would send SIGXFSZ.
  if (bytes > soft_limit(RLIMIT_FSIZE)) refuse_size(bytes, "ftruncate", EFBIG);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    refuse_size(bytes, "ftruncate", errno);
  }
}

void fix_size(const Descriptor& file) {
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot fix the size of shared memory: ") + std::strerror(errno));
  }
}

void refuse_size(uint64_t bytes, const char* call, int error) {
  throw Error(ErrorKind::kExhausted,
              "cannot make a segment of " + std::to_string(bytes) + " bytes: " + call + ": " +
                  std::strerror(error) + limit_text(RLIMIT_AS, "RLIMIT_AS") +
                  limit_text(RLIMIT_FSIZE, "RLIMIT_FSIZE") +
                  "; ask for a smaller one, or raise the limits (ulimit -v, ulimit -f)");
}

}  // namespace hbm::memory
