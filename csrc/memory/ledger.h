// What a heap has handed out: its blocks by address, and the sums.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "memory/block.h"

namespace hbm::memory {

struct Usage {
  uint64_t in_use_bytes = 0;
  uint64_t peak_bytes = 0;   // of in_use_bytes
  uint64_t hbm_bytes = 0;    // of in_use_bytes: asked of HBM nodes, which had room for them
  uint64_t ddr_bytes = 0;    // of in_use_bytes: DDR, by policy or spilled
  uint64_t allocations = 0;  // since the heap was made
  uint64_t spills = 0;  // allocations that kPreferred sent to DDR: HBM full, or past the budget
};

class Ledger {
 public:
  struct Entry {
    uint64_t hbm_bytes;
    uint64_t ddr_bytes;

    uint64_t bytes() const noexcept { return hbm_bytes + ddr_bytes; }
  };
  class Charge;
  struct Struck {
    OwnedBlock block;
    Entry entry;
  };

  // Strikes the block out and hands it to the caller; nothing when it is not in the ledger, which
  // is said in the log.
  std::optional<Struck> strike(void* block) noexcept;

  Usage usage() const;

 private:
  struct Held {
    FreeBlock free;
    Entry entry;
  };

  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<void*, Held> blocks_;
  Usage usage_;
};

// Bytes counted as in use before there is a block; given back on failure.
class Ledger::Charge {
 public:
  // `bound` limits the ledger's HBM bytes when the entry has any, else its DDR bytes; 0 is no
  // bound.
  Charge(Ledger& ledger, Entry entry, uint64_t bound);
  ~Charge();
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  bool granted() const noexcept { return granted_; }
  uint64_t used() const noexcept { return used_; }  // of the bound, before this charge

  // The block is the ledger's, and the charge stays, until strike().
  // REQUIRES: granted().
  void* keep(OwnedBlock block, bool spilled);

 private:
  Ledger& ledger_;
  const Entry entry_;
  uint64_t used_;
  bool granted_ = false;
};

}  // namespace hbm::memory
