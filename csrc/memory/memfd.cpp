#include "memory/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/error.h"
#include "memory/capacity.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The default size.
constexpr uint64_t kHeadroom = 4;                    // times the machine's memory,
constexpr uint64_t kModest = uint64_t{1} << 40;      // as long as that is no more than this
constexpr uint64_t kShareOfLimit = 8;                // of RLIMIT_AS: peers' files need space too
constexpr uint64_t kSmallest = uint64_t{256} << 20;  // less is no help

const uint64_t kPage = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));

uint64_t soft_limit(int resource) {
  rlimit limit{};
  const bool limited = getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? limit.rlim_cur : kUnlimited;
}

uint64_t default_size() {
  const uint64_t total = machine_total();
  const uint64_t wanted = std::max(total, std::min(kHeadroom * total, kModest));
  const uint64_t space = soft_limit(RLIMIT_AS);
  const uint64_t allowed =
      std::min(space == kUnlimited ? space : space / kShareOfLimit, soft_limit(RLIMIT_FSIZE));
  return std::max(std::min(wanted, allowed), kSmallest);
}

std::string limit_text(int resource, const char* name) {
  const uint64_t limit = soft_limit(resource);
  return limit == kUnlimited ? "" : "; " + std::string(name) + " is " + std::to_string(limit);
}

[[noreturn]] void refuse(uint64_t size, const char* call, int error) {
  throw Error(ErrorKind::kExhausted,
              "cannot make a segment of " + std::to_string(size) + " bytes: " + call + ": " +
                  std::strerror(error) + limit_text(RLIMIT_AS, "RLIMIT_AS") +
                  limit_text(RLIMIT_FSIZE, "RLIMIT_FSIZE") +
                  "; ask for a smaller one, or raise the limits (ulimit -v, ulimit -f)");
}

uint64_t huge_page_bytes() {
  uint64_t bytes = 0;
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> bytes;
  return bytes;
}

}  // namespace

Memfd::Memfd(const std::string& name, uint64_t size_bytes) : Memfd() {
  fd_ = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot make shared memory: memfd_create: ") + std::strerror(errno));
  }
  uint64_t size = size_bytes == 0 ? default_size() : size_bytes;
  resize(size);
  while (!map()) {
    if (errno != ENOMEM || size_bytes != 0 || size / 2 < kSmallest) refuse(size, "mmap", errno);
    resize(size /= 2);
  }
  // Whoever maps it can rely on its size: no access past a new end.
  if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot fix the size of shared memory: ") + std::strerror(errno));
  }
}

Memfd::~Memfd() {
  if (base_ != nullptr) munmap(base_, size_);
  if (fd_ >= 0) close(fd_);
}

void Memfd::resize(uint64_t size) {
  // The kernel would send SIGXFSZ.
  if (size > soft_limit(RLIMIT_FSIZE)) refuse(size, "ftruncate", EFBIG);
  if (size > static_cast<uint64_t>(std::numeric_limits<off_t>::max()) - kPage) {
    refuse(size, "ftruncate", EOVERFLOW);
  }
  size_ = (size + kPage - 1) / kPage * kPage;
  if (ftruncate(fd_, static_cast<off_t>(size_)) != 0) refuse(size, "ftruncate", errno);
}

bool Memfd::map() noexcept {
  void* const base = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) return false;
  base_ = static_cast<std::byte*>(base);
  madvise(base, size_, MADV_HUGEPAGE);  // a wish: page_bytes() tells what came of it
  return true;
}

uint64_t Memfd::page_bytes() const {
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    unsigned long kilobytes = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) == 2) {
      if (inside) break;
      inside = begin == reinterpret_cast<uintptr_t>(base_);
    } else if (inside && std::sscanf(line.c_str(), "ShmemPmdMapped: %lu", &kilobytes) == 1 &&
               kilobytes > 0) {
      return huge_page_bytes();
    }
  }
  return kPage;
}

}  // namespace hbm::memory
