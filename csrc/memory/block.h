// Blocks of memory: allocated by memkind or mapped, and freed by their owner. A ledger records the
// blocks that are handed out, by their address.
//
// Threads: everything may be called from any thread.
#pragma once

#include <memkind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory/policy.h"
#include "memory/reserved_arena.h"

namespace hbm::memory {

// Frees a block. Exactly one of the three members is set.
struct FreeBlock {
  memkind_t kind = nullptr;
  ReservedArena* arena = nullptr;
  size_t mapped_bytes = 0;  // the size of the block's own mapping

  void operator()(void* block) const noexcept;
};
using OwnedBlock = std::unique_ptr<void, FreeBlock>;

// Allocates a block, aligned to 64 bytes, or to a page if it has a page or more. Returns null if
// memkind has no block. Even then the kernel may have memory for the block, because memkind asks
// the kernel for up to a quarter more than the block.
OwnedBlock take_block(memkind_t kind, size_t bytes) noexcept;

// Maps just enough pages for `bytes`, on the nodes, or anywhere if `nodes` is empty. Throws
// Error(kExhausted) if the kernel refuses the mapping, PlacingError (placement.h) if it refuses the
// nodes.
OwnedBlock map_block(size_t bytes, Policy policy, const std::vector<int>& nodes);

// Returns the start of an error's text: "cannot allocate N bytes under memory policy "P"".
std::string cannot_allocate(size_t bytes, Policy policy);

struct Usage {
  uint64_t in_use_bytes = 0;
  uint64_t peak_bytes = 0;   // the largest in_use_bytes so far
  uint64_t hbm_bytes = 0;    // part of in_use_bytes: HBM nodes had room for it
  uint64_t ddr_bytes = 0;    // part of in_use_bytes: DDR, by policy or spilled
  uint64_t allocations = 0;  // since the ledger was made
  uint64_t spills = 0;       // allocations that kPreferred sent to DDR, because HBM was full
};

// The blocks that a heap or a segment has handed out, and the sums of their bytes.
class Ledger {
 public:
  struct BlockBytes {
    uint64_t hbm_bytes;
    uint64_t ddr_bytes;

    uint64_t total() const noexcept { return hbm_bytes + ddr_bytes; }
  };
  struct Struck {
    OwnedBlock block;
    BlockBytes bytes;
  };

  // Enters a block, which the ledger owns until strike(). Returns its address.
  void* enter(OwnedBlock block, BlockBytes bytes, bool spilled);

  // Removes the block and passes it to the caller. Returns nothing for an unknown block, and logs
  // an error.
  std::optional<Struck> strike(void* block) noexcept;

  Usage usage() const;

 private:
  struct HandedOut {
    FreeBlock free;
    BlockBytes bytes;
  };

  mutable std::mutex mutex_;  // guards the members below
  std::unordered_map<void*, HandedOut> blocks_;
  Usage usage_;
};

}  // namespace hbm::memory
