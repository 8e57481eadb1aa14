#include "memory/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/log.h"
#include "memory/libraries.h"
#include "memory/placement.h"
#include "memory/system_memory.h"

namespace hbm::memory {
namespace {

constexpr size_t kCacheLine = 64;

}  // namespace

void FreeBlock::operator()(void* block) const noexcept {
  if (kind != nullptr) {
    libraries().free(kind, block);
  } else if (arena != nullptr) {
    arena->free(block);
  } else if (munmap(block, mapped_bytes) != 0) {
    log::error(std::string("a heap cannot give memory back to the kernel: munmap: ") +
               std::strerror(errno));
  }
}

OwnedBlock take_block(memkind_t kind, size_t bytes) noexcept {
  void* block = nullptr;
  const size_t alignment = bytes < small_page_bytes() ? kCacheLine : small_page_bytes();
  if (libraries().posix_memalign(kind, &block, alignment, bytes) != 0) block = nullptr;
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

void* Ledger::enter(OwnedBlock block, BlockBytes bytes, bool spilled) {
  const std::lock_guard lock(mutex_);
  blocks_.emplace(block.get(), HandedOut{block.get_deleter(), bytes});
  usage_.hbm_bytes += bytes.hbm_bytes;
  usage_.ddr_bytes += bytes.ddr_bytes;
  usage_.in_use_bytes += bytes.total();
  usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.in_use_bytes);
  usage_.allocations += 1;
  if (spilled) usage_.spills += 1;
  return block.release();
}

std::optional<Ledger::Struck> Ledger::strike(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) {
    log::error("free() was handed a pointer that is not a block of this heap; ignored");
    return std::nullopt;
  }
  const auto [free, bytes] = found->second;
  usage_.hbm_bytes -= bytes.hbm_bytes;
  usage_.ddr_bytes -= bytes.ddr_bytes;
  usage_.in_use_bytes -= bytes.total();
  blocks_.erase(found);
  return Struck{OwnedBlock(block, free), bytes};
}

Usage Ledger::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

}  // namespace hbm::memory
