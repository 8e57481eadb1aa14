#include "memory/block.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/log.h"
#include "memory/limits.h"
#include "memory/pages.h"
#include "memory/place.h"

namespace hbm::memory {
namespace {

constexpr size_t kCacheLine = 64;

}  // namespace

void FreeBlock::operator()(void* block) const noexcept {
  if (kind != nullptr) {
    memkind_free(kind, block);
  } else if (munmap(block, mapped_bytes) != 0) {
    log::error(std::string("a heap cannot give memory back to the kernel: munmap: ") +
               std::strerror(errno));
  }
}

OwnedBlock take_block(memkind_t kind, size_t bytes) noexcept {
  void* block = nullptr;
  const size_t alignment = bytes < small_page_bytes() ? kCacheLine : small_page_bytes();
  if (memkind_posix_memalign(kind, &block, alignment, bytes) != 0) block = nullptr;
  return OwnedBlock(block, {.kind = kind});
}

OwnedBlock map_block(size_t bytes, Policy policy, const std::vector<int>& nodes) {
  const bool countable = bytes <= std::numeric_limits<size_t>::max() - small_page_bytes();
  const size_t size = countable ? whole_pages(bytes) : bytes;
  void* const base =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    throw Error(ErrorKind::kExhausted, cannot_allocate(bytes, policy) + ": mmap: " +
                                           std::strerror(error) + bounds_of_mappings(size));
  }
  OwnedBlock block(base, {.mapped_bytes = size});
  place_on(nodes, policy, base, size);
  // A huge page is on one node, and interleaving would not spread it.
  if (policy == Policy::kInterleave) madvise(base, size, MADV_NOHUGEPAGE);
  return block;
}

std::string cannot_allocate(size_t bytes, Policy policy) {
  return "cannot allocate " + std::to_string(bytes) + " bytes under memory policy \"" +
         policy_name(policy) + "\"";
}

}  // namespace hbm::memory
