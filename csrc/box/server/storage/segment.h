// A segment of the box: memory that clients know by a key.
//
// Threads: nothing but `attachments` and `counters` changes once anyone can attach to it.
#pragma once

#include <cstdint>
#include <memory>

#include "box/protocol/protocol.h"
#include "box/server/storage/counters.h"
#include "box/server/storage/stored_segment.h"
#include "memory/pool.h"

namespace hbm::box {

// The request that made a segment: the same one, sent again to a box that was restarted in between,
// is answered with the segment, not told that it exists. No session: unknown.
struct Creator {
  smb::Id session;
  uint64_t number = 0;  // smb::Sequence's

  friend bool operator==(const Creator&, const Creator&) = default;
};

class BoxSegment {
 public:
  smb::Id key;
  uint64_t size = 0;  // bytes, as asked for; the block may be larger
  bool temporary = false;
  Creator creator;
  std::shared_ptr<StoredSegment> stored;  // its file; none without a store
  std::shared_ptr<memory::PoolBlock> block;
  std::shared_ptr<void> registration;  // the verbs door's, which casts it back

  // Guarded by the registry's lock.
  uint32_t attachments = 0;
  bool awaited = false;  // its clients may come back to a box that was restarted

  Counters counters;
};

}  // namespace hbm::box
