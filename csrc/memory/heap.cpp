#include "memory/heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/placement.h"
#include "memory/room.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

// Returns null for a block that gets its own mapping, because it is large or memkind has no block.
OwnedBlock take_unmapped(memkind_t kind, size_t bytes) noexcept {
  return bytes < kMappedBlockBytes ? take_block(kind, bytes) : OwnedBlock();
}

// Returns true if HBM is full or the kernel refuses to place memory there. Returns false if the
// error only reports that the kernel's figures cannot be read.
bool is_shortage_of_hbm(const Error& error) {
  return error.kind() == ErrorKind::kExhausted ||
         dynamic_cast<const PlacingError*>(&error) != nullptr;
}

}  // namespace

Heap::Heap(Policy policy) : policy_(policy), has_hbm_(comes_from_hbm(policy)) {}

void* Heap::allocate(size_t bytes) {
  fork_.require_owner("allocate from its parent's heap");
  bytes = std::max<size_t>(bytes, 1);
  if (has_hbm_) {
    try {
      return allocate_hbm(bytes);
    } catch (const Error& error) {
      if (policy_ != Policy::kPreferred || !is_shortage_of_hbm(error)) throw;
      notice_spill(error.what());
    }
  }
  return allocate_ddr(bytes);
}

void Heap::free(void* block) noexcept {
  if (block == nullptr || fork_.in_child()) return;
  ledger_.strike(block);
}

Usage Heap::stats() const { return fork_.in_child() ? Usage() : ledger_.usage(); }

void* Heap::allocate_hbm(size_t bytes) {
  OwnedBlock block = take_unmapped(kind_of(policy_), bytes);
  const std::vector<int> nodes = block ? block_nodes(block.get()) : hbm_nodes(policy_);
  if (!block) {
    // Checks the room before it maps, because the kernel may give another reason when it refuses a
    // mapping larger than the nodes.
    require_room(bytes, nodes, room_on(nodes, policy_ == Policy::kInterleave));
    block = map_block(bytes, policy_, nodes);
  }
  require_room(bytes, nodes, commit(block.get(), bytes, policy_, nodes, MADV_DONTNEED));
  return ledger_.enter(std::move(block), {.hbm_bytes = bytes, .ddr_bytes = 0}, /*spilled=*/false);
}

void* Heap::allocate_ddr(size_t bytes) {
  const uint64_t room = machine_room();
  if (bytes > room) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy_) + ": the machine can give " + std::to_string(room));
  }
  OwnedBlock block = take_unmapped(kind_of(Policy::kDdr), bytes);
  if (!block) block = map_block(bytes, policy_, /*nodes=*/{});
  return ledger_.enter(std::move(block), {.hbm_bytes = 0, .ddr_bytes = bytes},
                       /*spilled=*/has_hbm_);
}

void Heap::require_room(size_t bytes, const std::vector<int>& nodes, uint64_t fitting) const {
  if (fitting < bytes) {
    throw Error(ErrorKind::kExhausted, shortage(bytes, policy_, nodes, fitting));
  }
}

}  // namespace hbm::memory
