#include "memory/block.h"

#include <unistd.h>

namespace hbm::memory {
namespace {

constexpr size_t kCacheLine = 64;

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

}  // namespace

OwnedBlock take_block(memkind_t kind, size_t bytes) noexcept {
  void* block = nullptr;
  const size_t alignment = bytes < kPage ? kCacheLine : kPage;
  if (memkind_posix_memalign(kind, &block, alignment, bytes) != 0) block = nullptr;
  return OwnedBlock(block, FreeBlock{kind});
}

std::string cannot_allocate(size_t bytes, Policy policy) {
  return "cannot allocate " + std::to_string(bytes) + " bytes under memory policy \"" +
         policy_name(policy) + "\"";
}

}  // namespace hbm::memory
