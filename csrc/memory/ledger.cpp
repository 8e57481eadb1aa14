#include "memory/ledger.h"

#include <algorithm>

#include "base/log.h"

namespace hbm::memory {

std::optional<Ledger::Struck> Ledger::strike(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) {
    log::error("free() was handed a pointer that is not a block of this heap; ignored");
    return std::nullopt;
  }
  const auto [free, entry] = found->second;
  usage_.hbm_bytes -= entry.hbm_bytes;
  usage_.ddr_bytes -= entry.ddr_bytes;
  usage_.in_use_bytes -= entry.bytes();
  blocks_.erase(found);
  return Struck{OwnedBlock(block, free), entry};
}

Usage Ledger::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

Ledger::Charge::Charge(Ledger& ledger, Entry entry, uint64_t bound)
    : ledger_(ledger), entry_(entry) {
  const std::lock_guard lock(ledger.mutex_);
  Usage& usage = ledger.usage_;
  used_ = entry.hbm_bytes != 0 ? usage.hbm_bytes : usage.ddr_bytes;
  if (bound != 0 && (used_ > bound || entry.bytes() > bound - used_)) return;
  granted_ = true;
  usage.hbm_bytes += entry.hbm_bytes;
  usage.ddr_bytes += entry.ddr_bytes;
  usage.in_use_bytes += entry.bytes();
}

Ledger::Charge::~Charge() {
  if (!granted_) return;
  const std::lock_guard lock(ledger_.mutex_);
  ledger_.usage_.hbm_bytes -= entry_.hbm_bytes;
  ledger_.usage_.ddr_bytes -= entry_.ddr_bytes;
  ledger_.usage_.in_use_bytes -= entry_.bytes();
}

void* Ledger::Charge::keep(OwnedBlock block, bool spilled) {
  const std::lock_guard lock(ledger_.mutex_);
  ledger_.blocks_.emplace(block.get(), Held{block.get_deleter(), entry_});
  Usage& usage = ledger_.usage_;
  usage.allocations += 1;
  usage.peak_bytes = std::max(usage.peak_bytes, usage.in_use_bytes);
  if (spilled) usage.spills += 1;
  granted_ = false;
  return block.release();
}

}  // namespace hbm::memory
