#include "memory/heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/error.h"
#include "base/log.h"
#include "memory/capacity.h"
#include "memory/kinds.h"
#include "memory/placement.h"

namespace hbm::memory {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kCommitSlice = size_t{16} << 20;

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// Both are conditions of the machine, not of one heap: one line a process says enough.
void warn_once(std::atomic<bool>& said, const std::string& message) {
  if (!said.exchange(true, std::memory_order_relaxed)) log::notice(message);
}
std::atomic<bool> said_absent{false};
std::atomic<bool> said_full{false};

void touch(char* begin, size_t bytes) noexcept {
  volatile char* page = begin;
  for (size_t offset = 0; offset < bytes; offset += kPage) page[offset] = 0;
}

uint64_t bytes_in_place(const void* block, size_t bytes) {
  uint64_t sum = 0;
  for (const auto& [node, there] : where(block, bytes)) sum += there;
  return sum;
}

}  // namespace

// Bytes counted as in use from before memkind is asked until free(); given back on failure.
class Heap::Charge {
 public:
  // Leaves a reason in `shortage` when the budget does not allow it.
  Charge(Heap& heap, size_t bytes, bool hbm, std::string* shortage)
      : heap_(heap), bytes_(bytes), hbm_(hbm) {
    std::lock_guard lock(heap.mutex_);
    HeapStats& stats = heap.stats_;
    const bool bounded = hbm || heap.policy_ != Policy::kPreferred;
    const uint64_t used = hbm ? stats.hbm_bytes : stats.ddr_bytes;
    if (bounded && stats.budget_bytes != 0 &&
        (used > stats.budget_bytes || bytes > stats.budget_bytes - used)) {
      *shortage = heap.request(bytes) + ": the budget is " + std::to_string(stats.budget_bytes) +
                  " bytes, and " + std::to_string(used) + " are in use";
      return;
    }
    charged_ = true;
    (hbm ? stats.hbm_bytes : stats.ddr_bytes) += bytes;
    stats.in_use_bytes += bytes;
  }
  ~Charge() {
    if (!charged_) return;
    std::lock_guard lock(heap_.mutex_);
    (hbm_ ? heap_.stats_.hbm_bytes : heap_.stats_.ddr_bytes) -= bytes_;
    heap_.stats_.in_use_bytes -= bytes_;
  }

  bool granted() const noexcept { return charged_; }

  // The block is the caller's, and the charge stays until free().
  void* keep(Owned block) {
    std::lock_guard lock(heap_.mutex_);
    heap_.blocks_.emplace(block.get(), Block{block.get_deleter().kind, bytes_, hbm_});
    HeapStats& stats = heap_.stats_;
    stats.allocations += 1;
    stats.peak_bytes = std::max(stats.peak_bytes, stats.in_use_bytes);
    if (!hbm_ && heap_.has_hbm_) stats.spills += 1;
    charged_ = false;
    return block.release();
  }

 private:
  Heap& heap_;
  size_t bytes_;
  bool hbm_;
  bool charged_ = false;
};

Heap::Heap(Policy policy, uint64_t budget_bytes) : policy_(policy) {
  stats_.budget_bytes = budget_bytes;
  if (policy == Policy::kDdr) return;
  const std::string reason = why_unavailable_or_throw(kind_of(policy));
  has_hbm_ = reason.empty();
  if (has_hbm_) return;
  if (policy != Policy::kPreferred) {
    throw Error(ErrorKind::kUnavailable,
                std::string("memory policy \"") + policy_name(policy) +
                    "\" needs high-bandwidth memory, and memkind finds none (" + reason +
                    "); use \"preferred\" or \"ddr\", or name the nodes in MEMKIND_HBW_NODES");
  }
  warn_once(said_absent, "memkind finds no high-bandwidth memory (" + reason +
                             "): memory policy \"preferred\" uses DDR");
}

void* Heap::allocate(size_t bytes) {
  fork_.require_owner("allocate from its parent's heap");
  bytes = std::max<size_t>(bytes, 1);
  if (has_hbm_) {
    std::string shortage;
    if (void* block = allocate_hbm(bytes, &shortage)) return block;
    if (policy_ != Policy::kPreferred) throw Error(ErrorKind::kExhausted, shortage);
    warn_once(said_full, shortage + "; using DDR, here and from now on whenever HBM is short");
  }
  return allocate_ddr(bytes);
}

void Heap::free(void* block) noexcept {
  if (block == nullptr || fork_.in_child()) return;
  memkind_t kind;
  {
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) {
      log::error("Heap::free was handed a pointer that is not a block of this heap; ignored");
      return;
    }
    kind = found->second.kind;
    (found->second.hbm ? stats_.hbm_bytes : stats_.ddr_bytes) -= found->second.bytes;
    stats_.in_use_bytes -= found->second.bytes;
    blocks_.erase(found);
  }
  memkind_free(kind, block);
}

HeapStats Heap::stats() const {
  if (fork_.in_child()) return HeapStats{.budget_bytes = stats_.budget_bytes};
  std::lock_guard lock(mutex_);
  return stats_;
}

Heap::Owned Heap::take(memkind_t kind, size_t bytes) const {
  void* block = nullptr;
  const size_t alignment = bytes < kPage ? kCacheLine : kPage;
  if (memkind_posix_memalign(kind, &block, alignment, bytes) != 0) block = nullptr;
  return Owned(block, Return{kind});
}

void* Heap::allocate_hbm(size_t bytes, std::string* shortage) {
  Charge charge(*this, bytes, /*hbm=*/true, shortage);
  if (!charge.granted()) return nullptr;
  Owned block = take(kind_of(policy_), bytes);
  if (!block) {
    *shortage = request(bytes) +
                ": memkind gave none (the address space is short, or a container "
                "without the capability SYS_NICE forbids mbind)";
    return nullptr;
  }
  *shortage = place(block.get(), bytes);
  return shortage->empty() ? charge.keep(std::move(block)) : nullptr;
}

void* Heap::allocate_ddr(size_t bytes) {
  std::string shortage;
  Charge charge(*this, bytes, /*hbm=*/false, &shortage);
  if (!charge.granted()) throw Error(ErrorKind::kExhausted, shortage);
  const uint64_t room = machine_room();
  Owned block = bytes <= room ? take(MEMKIND_DEFAULT, bytes) : Owned(nullptr, Return{});
  if (!block) {
    throw Error(ErrorKind::kExhausted,
                request(bytes) + ": the machine can give " + std::to_string(room));
  }
  return charge.keep(std::move(block));
}

// Sees that the block's nodes can hold it, and under the strict policies puts its pages there,
// slice by slice, so that processes that do the same at one moment share the margin. Returns why
// not, or an empty string.
std::string Heap::place(void* block, size_t bytes) const {
  const std::vector<int> nodes = block_nodes(block);
  const bool strict = policy_ != Policy::kPreferred;
  char* const begin = static_cast<char*>(block);
  for (size_t done = 0; done < bytes;) {
    const size_t left = bytes - done;
    const uint64_t room = room_on(nodes, policy_ == Policy::kInterleave);
    // Pages that memkind reuses are there already and need no room.
    if (left > room && left - bytes_in_place(begin + done, left) > room) {
      if (done != 0) madvise(block, done, MADV_DONTNEED);
      std::string names;
      for (int node : nodes) names += (names.empty() ? "" : ",") + std::to_string(node);
      return request(bytes) + ": HBM node " + names + " can give " + std::to_string(room + done);
    }
    if (!strict) break;
    const size_t slice = std::min(left, kCommitSlice);
    touch(begin + done, slice);
    done += slice;
  }
  return {};
}

std::string Heap::request(size_t bytes) const {
  return "cannot allocate " + std::to_string(bytes) + " bytes under memory policy \"" +
         policy_name(policy_) + "\"";
}

}  // namespace hbm::memory
