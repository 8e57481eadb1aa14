// What a rank shows its neighbours: the memory layout of one group's area in the rank's segment.
// docs/design/shared-memory.md is this header's twin.
//
// The owner alone writes its area, but for the fields that say otherwise; everybody on the node
// reads it. All ranks of a node run the same version on the same processor, so structs are the
// format.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "communicator/message.h"

namespace hbm::shm {

inline constexpr size_t kCacheLine = 64;
inline constexpr uint64_t kAreaMagic = 0x326165726d6268;  // "hbmrea2": another layout, another one

// How a rank is woken. See ShmGroup::sleep().
struct alignas(kCacheLine) Doorbell {
  std::atomic<uint32_t> bell;    // counts rings; anyone on the node adds to it
  std::atomic<uint32_t> asleep;  // threads of the owner that sleep on `bell`, or are about to
};

// The first failure that anyone on the node has noticed. That of the first member counts for all.
struct FailureReport {
  enum State : uint32_t { kNone, kWriting, kWritten };
  std::atomic<uint32_t> state;  // who takes it from kNone to kWriting writes the rest
  uint32_t death;               // 1: another rank's process has ended
  std::array<char, 1000> text;
};

// Where the data of one stream, from the area's owner to one member, is to be found.
struct StreamLocation {
  enum Kind : uint32_t {
    kSlots,     // in the slots, chunk by chunk
    kZeroCopy,  // in the owner's segment, all of it
  };
  uint64_t count;   // elements of the stream
  uint64_t offset;  // kZeroCopy: from the segment's start; kSlots: from the start of a slot's data
  uint32_t kind;
  uint32_t unused;
};

// What a rank publishes with one phase. A StreamLocation for each member follows, then the data.
struct alignas(kCacheLine) Slot {
  MessageHeader header;
  StreamLocation place;  // of a reduction's buffer
  uint64_t chunk;        // bytes of a stream in one slot
  uint64_t rounds;       // phases that the streams in slots need
  uint32_t direct;       // 1: some stream is kZeroCopy, so a last phase must say that it was read
};
static_assert(sizeof(Slot) == 2 * kCacheLine);

struct alignas(kCacheLine) Control {
  uint64_t magic;
  uint64_t chunk_bytes;
  alignas(kCacheLine) std::atomic<uint64_t> phase;  // the last one that the owner published
  // Neighbours that will not look here again; each adds itself.
  std::atomic<uint32_t> left;  // 1: the owner destroyed the group
  alignas(kCacheLine) std::atomic<uint32_t> released;
  Doorbell collectives;
  Doorbell transfers;
  FailureReport failure;
};

// Offsets in an area of a shm_group of `members`.
struct AreaLayout {
  AreaLayout(size_t members, size_t chunk_bytes);

  size_t chunk_bytes;  // of a reduction's slot
  size_t data;         // where a slot's data starts: behind a StreamLocation for each member
  size_t data_bytes;   // room for data: two chunks, and a cache line for each member
  size_t slot;         // of slot 0; slot 1 follows
  size_t slot_stride;
  size_t mail;  // of the mailbox for member 0; the others follow
  size_t mail_stride;
  size_t total;
};

// Sets up an area in fresh or used memory. Called by the owner, before anyone else sees it.
void format_area(std::byte* area, const AreaLayout& layout) noexcept;

}  // namespace hbm::shm
