#include "memory/memfd.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "memory/capacity.h"
#include "memory/limits.h"
#include "memory/pages.h"
#include "memory/shared_file.h"

namespace hbm::memory {
namespace {

// The default size.
constexpr uint64_t kHeadroom = 4;                    // times the machine's memory,
constexpr uint64_t kModest = uint64_t{1} << 40;      // as long as that is no more than this
constexpr uint64_t kShareOfLimit = 8;                // of RLIMIT_AS: peers' files need space too
constexpr uint64_t kSmallest = uint64_t{256} << 20;  // less is no help

uint64_t default_size() {
  const uint64_t total = machine_total();
  const uint64_t wanted = std::max(total, std::min(kHeadroom * total, kModest));
  const uint64_t space = soft_limit(RLIMIT_AS);
  const bool unlimited = space == std::numeric_limits<uint64_t>::max();
  const uint64_t allowed =
      std::min(unlimited ? space : space / kShareOfLimit, soft_limit(RLIMIT_FSIZE));
  return std::max(std::min(wanted, allowed), kSmallest);
}

}  // namespace

Memfd::Memfd(const std::string& name, uint64_t size_bytes) : Memfd() {
  file_ = make_shared_file(name);
  uint64_t size = size_bytes == 0 ? default_size() : size_bytes;
  resize(size);
  while (!map()) {
    if (errno != ENOMEM || size_bytes != 0 || size / 2 < kSmallest) {
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
  madvise(base, size_, MADV_HUGEPAGE);  // a wish: largest_page_bytes() tells what came of it
  return true;
}

}  // namespace hbm::memory
