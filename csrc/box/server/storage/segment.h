// A segment of the box: its memory, its file in a store, and counts of the operations on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "box/protocol/protocol.h"
#include "memory/pool.h"

namespace hbm::box::server::storage {

// Counts of operations. Each count is updated independently, in relaxed order.
//
// Threads: any.
class Counters {
 public:
  void count(protocol::Opcode opcode,
             uint64_t bytes) noexcept;  // only kRead, kWrite, kAccumulate, kFetchAdd
  protocol::Counts counts() const noexcept;

 private:
  using Count = std::atomic<uint64_t>;
  Count reads_{0}, read_bytes_{0};
  Count writes_{0}, written_bytes_{0};
  Count accumulates_{0}, accumulated_bytes_{0};
  Count fetch_adds_{0};
};

// A segment's file in a store.
//
// Threads: any.
class StoredSegment {
 public:
  StoredSegment(uint64_t serial, std::string path) : serial(serial), path(std::move(path)) {}
  ~StoredSegment();  // removes the file if remove_at_end() was called
  StoredSegment(const StoredSegment&) = delete;
  StoredSegment& operator=(const StoredSegment&) = delete;

  const uint64_t serial;  // unique in the store, also among segments of one key
  const std::string path;

  void remove_at_end() noexcept { remove_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<bool> remove_{false};
};

// The request that created a segment. If the client repeats the request after a restart of the box,
// the box finds the segment by its creator, and replies with it. Otherwise the box would execute
// the request again, and refuse kCreate because the key exists. No `session`: the creator is
// unknown.
struct Creator {
  protocol::Id session;
  uint64_t number = 0;  // sequence number of the request

  friend bool operator==(const Creator&, const Creator&) = default;
};

// A segment of the box.
//
// Threads: only `attachments`, `awaited` and `counters` change once clients can attach.
class BoxSegment {
 public:
  protocol::Id key;
  uint64_t size = 0;  // bytes, as asked for; the block may be larger
  bool temporary = false;
  Creator creator;
  std::shared_ptr<StoredSegment> stored;  // the file; none without a store
  std::shared_ptr<memory::PoolBlock> block;
  std::shared_ptr<void> registration;  // of the verbs listener, which knows its type

  // Guarded by the registry's lock.
  uint32_t attachments = 0;
  bool awaited = false;  // true: the box has restarted, and clients may still reconnect

  Counters counters;
};

}  // namespace hbm::box::server::storage
