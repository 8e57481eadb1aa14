#include "memory/heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/capacity.h"
#include "memory/commit.h"
#include "memory/kinds.h"

namespace hbm::memory {

Heap::Heap(Policy policy, uint64_t budget_bytes)
    : policy_(policy), budget_bytes_(budget_bytes), has_hbm_(comes_from_hbm(policy)) {}

void* Heap::allocate(size_t bytes) {
  fork_.require_owner("allocate from its parent's heap");
  bytes = std::max<size_t>(bytes, 1);
  if (has_hbm_) {
    std::string reason;
    if (void* block = allocate_hbm(bytes, &reason)) return block;
    if (policy_ != Policy::kPreferred) throw Error(ErrorKind::kExhausted, reason);
    notice_spill(reason);
  }
  return allocate_ddr(bytes);
}

void Heap::free(void* block) noexcept {
  if (block == nullptr || fork_.in_child()) return;
  if (const auto entry = ledger_.strike(block)) memkind_free(entry->kind, block);
}

HeapStats Heap::stats() const {
  HeapStats stats;
  if (!fork_.in_child()) static_cast<Usage&>(stats) = ledger_.usage();
  stats.budget_bytes = budget_bytes_;
  return stats;
}

void* Heap::allocate_hbm(size_t bytes, std::string* reason) {
  const memkind_t kind = kind_of(policy_);
  Ledger::Charge charge(ledger_, {.kind = kind, .hbm_bytes = bytes, .ddr_bytes = 0}, budget_bytes_);
  if (!charge.granted()) {
    *reason = past_budget(bytes, charge.used());
    return nullptr;
  }
  OwnedBlock block = take_block(kind, bytes);
  if (!block) {
    *reason = cannot_allocate(bytes, policy_) +
              ": memkind gave none (the address space is short, or a container "
              "without the capability SYS_NICE forbids mbind)";
    return nullptr;
  }
  const std::vector<int> nodes = block_nodes(block.get());
  const uint64_t fitting = commit(block.get(), bytes, policy_, nodes, MADV_DONTNEED);
  if (fitting < bytes) {
    *reason = shortage(bytes, policy_, nodes, fitting);
    return nullptr;
  }
  return charge.keep(std::move(block), /*spilled=*/false);
}

void* Heap::allocate_ddr(size_t bytes) {
  // Under kPreferred the budget is HBM's alone.
  Ledger::Charge charge(ledger_, {.kind = MEMKIND_DEFAULT, .hbm_bytes = 0, .ddr_bytes = bytes},
                        policy_ == Policy::kPreferred ? 0 : budget_bytes_);
  if (!charge.granted()) throw Error(ErrorKind::kExhausted, past_budget(bytes, charge.used()));
  const uint64_t room = machine_room();
  OwnedBlock block = bytes <= room ? take_block(MEMKIND_DEFAULT, bytes) : OwnedBlock();
  if (!block) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy_) + ": the machine can give " + std::to_string(room));
  }
  return charge.keep(std::move(block), /*spilled=*/has_hbm_);
}

std::string Heap::past_budget(size_t bytes, uint64_t used) const {
  return cannot_allocate(bytes, policy_) + ": the budget is " + std::to_string(budget_bytes_) +
         " bytes, and " + std::to_string(used) + " are in use";
}

}  // namespace hbm::memory
