// A segment of the box: memory that clients know by a key, its file in a store, and what was done
// with it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "box/protocol/protocol.h"
#include "memory/pool.h"

namespace hbm::box {

// Counts of operations, by many threads; each count on its own, relaxed.
//
// Threads: every member may be called from any thread.
class Counters {
 public:
  void count(smb::Opcode opcode, uint64_t bytes) noexcept;  // kRead, kWrite, kAccumulate, kFetchAdd
  smb::Counts counts() const noexcept;

 private:
  using Count = std::atomic<uint64_t>;
  Count reads_{0}, read_bytes_{0};
  Count writes_{0}, written_bytes_{0};
  Count accumulates_{0}, accumulated_bytes_{0};
  Count fetch_adds_{0};
};

// A segment's file in a store.
//
// Threads: every member may be called from any thread.
class StoredSegment {
 public:
  StoredSegment(uint64_t serial, std::string path) : serial(serial), path(std::move(path)) {}
  ~StoredSegment();  // removes the file if remove_at_end() was called
  StoredSegment(const StoredSegment&) = delete;
  StoredSegment& operator=(const StoredSegment&) = delete;

  const uint64_t serial;  // tells it from all others of the store, also from those of the same key
  const std::string path;

  void remove_at_end() noexcept { remove_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<bool> remove_{false};
};

// The request that made a segment: the same one, sent again to a box that was restarted in between,
// is answered with the segment, not told that it exists. No session: unknown.
struct Creator {
  smb::Id session;
  uint64_t number = 0;  // smb::Sequence's

  friend bool operator==(const Creator&, const Creator&) = default;
};

// A segment of the box.
//
// Threads: nothing but `attachments` and `counters` changes once anyone can attach to it.
class BoxSegment {
 public:
  smb::Id key;
  uint64_t size = 0;  // bytes, as asked for; the block may be larger
  bool temporary = false;
  Creator creator;
  std::shared_ptr<StoredSegment> stored;  // its file; none without a store
  std::shared_ptr<memory::PoolBlock> block;
  std::shared_ptr<void> registration;  // the verbs listener's, which casts it back

  // Guarded by the registry's lock.
  uint32_t attachments = 0;
  bool awaited = false;  // its clients may come back to a box that was restarted

  Counters counters;
};

}  // namespace hbm::box
