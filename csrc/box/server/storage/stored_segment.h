// A segment's file in a store.
//
// Threads: every member may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace hbm::box {

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

}  // namespace hbm::box
