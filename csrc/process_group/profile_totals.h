// Totals of the operations that a process has ended, by their kind, size, path and data. They are
// the counters of the metrics (docs/profile.md). Needs no PyTorch.
//
// Threads: none; the owner guards the object.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <string_view>
#include <vector>

#include "process_group/tuning.h"

namespace hbm::process_group {

// How data moves between ranks.
enum class Path : uint8_t {
  kShm,        // in memory that all ranks share
  kMpi,        // in messages, over MPI or TCP links
  kShmAndMpi,  // within each node in shared memory, and between the nodes in messages
};

// The classes of sizes: the most bytes of each class. The last class, of larger operations, has
// kNoLimit. torch_hbmcomm/profiling/costs.py names them.
inline constexpr uint64_t kNoLimit = 0;
inline constexpr std::array<uint64_t, 4> kSizeLimits = {4 << 10, 64 << 10, 1 << 20, 16 << 20};

// Returns the class of `bytes`: its limit.
constexpr uint64_t size_limit(uint64_t bytes) noexcept {
  for (const uint64_t limit : kSizeLimits) {
    if (bytes <= limit) return limit;
  }
  return kNoLimit;
}

class ProfileTotals {
 public:
  struct Key {
    std::string_view kind{};  // in static storage
    uint64_t limit = 0;       // of the class of sizes
    Path path = Path::kShm;
    bool staged = false;     // as in progress::Observation
    bool zero_copy = false;  // the same
    int last_rank = -1;      // the number in the job of the rank that began last; -1: none
    auto operator<=>(const Key&) const = default;
  };
  // Times: ns.
  struct Total {
    Key key{};
    uint64_t calls = 0;
    uint64_t bytes = 0;
    int64_t transit_ns = 0;
    int64_t hidden_ns = 0;
    int64_t waiting_ns = 0;  // until key.last_rank began
  };

  // Reserves the memory of all totals, so that add() allocates nothing.
  ProfileTotals() { totals_.reserve(kMostTotals); }

  // Adds `one` to the total of its key. If kMostTotals other keys have totals, its calls are
  // counted in uncounted() instead.
  void add(const Total& one) noexcept {
    const auto found = std::ranges::lower_bound(totals_, one.key, {}, &Total::key);
    if (found != totals_.end() && found->key == one.key) {
      found->calls += one.calls;
      found->bytes += one.bytes;
      found->transit_ns += one.transit_ns;
      found->hidden_ns += one.hidden_ns;
      found->waiting_ns += one.waiting_ns;
    } else if (totals_.size() < kMostTotals) {
      totals_.insert(found, one);
    } else {
      uncounted_ += one.calls;
    }
  }

  // Counts an operation that no total has.
  void leave_out() noexcept { ++uncounted_; }

  // Returns the totals, in the order of their keys.
  const std::vector<Total>& totals() const noexcept { return totals_; }
  uint64_t uncounted() const noexcept { return uncounted_; }

 private:
  std::vector<Total> totals_;
  uint64_t uncounted_ = 0;
};

}  // namespace hbm::process_group
