#include "memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "memory/system_memory.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

// Throws an error that names this process' limits.
[[noreturn]] void refuse_size(uint64_t bytes, const char* call, int error) {
  throw Error(ErrorKind::kExhausted,
              "cannot make a segment of " + std::to_string(bytes) + " bytes: " + call + ": " +
                  std::strerror(error) + limit_text(RLIMIT_AS, "RLIMIT_AS") +
                  limit_text(RLIMIT_FSIZE, "RLIMIT_FSIZE") +
                  "; ask for a smaller one, or raise the limits (ulimit -v, ulimit -f)");
}

}  // namespace

uint64_t default_segment_bytes() {
  const uint64_t total = machine_total();
  const uint64_t wanted =
      std::max(total, std::min(kSegmentAddressesPerMemory * total, kLargestSpareSegmentBytes));
  const uint64_t space = soft_limit(RLIMIT_AS);
  const bool unlimited = space == std::numeric_limits<uint64_t>::max();
  const uint64_t allowed =
      std::min(unlimited ? space : space / kAddressLimitDivisor, soft_limit(RLIMIT_FSIZE));
  // The kernel refuses a file that is larger than RLIMIT_FSIZE, so a low limit lowers the least
  // size.
  const uint64_t smallest =
      std::clamp(soft_limit(RLIMIT_FSIZE), kLeastLimitedSegmentBytes, kLeastDefaultSegmentBytes);
  return std::max(std::min(wanted, allowed), smallest);
}

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
  // Beyond the limit ftruncate() would end the process by SIGXFSZ.
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

Memfd::Memfd(const std::string& name, uint64_t size_bytes) : Memfd() {
  file_ = make_shared_file(name);
  uint64_t size = size_bytes == 0 ? default_segment_bytes() : size_bytes;
  resize(size);
  while (!map()) {
    if (errno != ENOMEM || size_bytes != 0 || size / 2 < kLeastDefaultSegmentBytes) {
      refuse_size(size, "mmap", errno);
    }
    resize(size /= 2);
  }
  fix_size(file_);
}

Memfd::~Memfd() {
  if (base_ != nullptr) munmap(base_, size_);
}

void Memfd::resize(uint64_t size) {
  if (size > static_cast<uint64_t>(std::numeric_limits<off_t>::max()) - small_page_bytes()) {
    refuse_size(size, "ftruncate", EOVERFLOW);
  }
  size_ = whole_pages(size);
  set_size(file_, size_);
}

bool Memfd::map() noexcept {
  void* const base = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (base == MAP_FAILED) return false;
  base_ = static_cast<std::byte*>(base);
  madvise(base, size_, MADV_HUGEPAGE);  // a hint: largest_page_bytes() shows the result
  return true;
}

std::shared_ptr<SharedMapping> map_segment(int fd) {
  struct stat file{};
  if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode) || file.st_size <= 0) {
    throw Error(ErrorKind::kInvalid,
                "cannot map descriptor " + std::to_string(fd) + ": it is no file with bytes in it");
  }
  const auto bytes = static_cast<size_t>(file.st_size);
  return std::make_shared<SharedMapping>(fd, bytes, /*writable=*/true, "a peer's segment");
}

}  // namespace hbm::memory
