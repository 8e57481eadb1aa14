// Blocks of memory: taken from memkind or mapped, freed by their owner, and, once handed out, in a
// ledger by their address.
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
#include "memory/segment_front.h"

namespace hbm::memory {

// Where a block goes back to: one of the three.
struct FreeBlock {
  memkind_t kind = nullptr;
  SegmentFront* front = nullptr;
  size_t mapped_bytes = 0;  // of a mapping of its own

  void operator()(void* block) const noexcept;
};
using OwnedBlock = std::unique_ptr<void, FreeBlock>;

// Aligned to 64 bytes, or to a page from a page up. Null when memkind gives none, which also
// happens when the kernel has room: memkind asks it for more than the block, by up to a quarter.
OwnedBlock take_block(memkind_t kind, size_t bytes) noexcept;

// Maps exactly the pages that hold `bytes`, on the nodes; without nodes, anywhere.
// Throws Error(kExhausted) when the kernel gives no such mapping, PlacingError (placement.h) when
// it refuses to place it.
OwnedBlock map_block(size_t bytes, Policy policy, const std::vector<int>& nodes);

// "cannot allocate N bytes under memory policy "P"", for the start of a message.
std::string cannot_allocate(size_t bytes, Policy policy);

struct Usage {
  uint64_t in_use_bytes = 0;
  uint64_t peak_bytes = 0;   // of in_use_bytes
  uint64_t hbm_bytes = 0;    // of in_use_bytes: asked of HBM nodes, which had room for them
  uint64_t ddr_bytes = 0;    // of in_use_bytes: DDR, by policy or spilled
  uint64_t allocations = 0;  // since the ledger was made
  uint64_t spills = 0;       // allocations that kPreferred sent to DDR, because HBM was full
};

// The blocks that a heap or a segment has handed out, and their sums.
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

  // Returns the block's address; the block is the ledger's until strike().
  void* enter(OwnedBlock block, BlockBytes bytes, bool spilled);

  // Strikes the block out and hands it to the caller; nothing when it is not in the ledger, which
  // is said in the log.
  std::optional<Struck> strike(void* block) noexcept;

  Usage usage() const;

 private:
  struct HandedOut {
    FreeBlock free;
    BlockBytes bytes;
  };

  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<void*, HandedOut> blocks_;
  Usage usage_;
};

}  // namespace hbm::memory
