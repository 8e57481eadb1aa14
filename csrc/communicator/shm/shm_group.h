// The ranks of a group that share this node's memory, and their synchronisation.
//
// A ShmGroup counts phases. In each phase every rank publishes one slot of its control region, then
// waits until all have published. The two slots of a region alternate: a rank uses the slot of
// phase t again in phase t + 2. By then no rank reads phase t any more. A rank publishes phase
// t + 1 only after it has read the slots of phase t, and phase t + 2 begins after every rank has
// published t + 1. All collectives are sequences of phases (communicator/shm/phased_operation.h). A
// collective continues the count of phases of the previous collective, so no state has to be
// cleared between them.
//
// Memory order: publish() releases the slot by its store of `phase`; all_here() acquires the slot.
// A fence after that store, the loads in all_here() and the doorbell's `asleep` are sequentially
// consistent. So either a sleeper sees the phase of the last rank before it sleeps, or the last
// rank sees the sleeper and rings. (A sequentially consistent store would wait for the stores
// before it, and often fetch the cache line again from a reader.) Messages use the bell's count in
// place of the phase. docs/design/shared-memory.md has the whole argument.
//
// Threads: several processes share the segments. In this process one thread at a time uses the
// phases; any thread may call the other members.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "communicator/shm/control_region.h"
#include "kernels/copy_to_peers.h"
#include "kernels/parallel.h"
#include "progress/operation.h"

namespace hbm::communicator::shm {

using Clock = std::chrono::steady_clock;

struct LocalRank {
  int group_rank;
  std::string name;    // for errors: "rank 3 (pid 4711 on host)"
  std::byte* segment;  // the segment's address in this process
  size_t segment_bytes;
  size_t region;   // offset of the group's control region in the segment
  int pidfd = -1;  // readable (POLLIN) after the process has ended; -1: this process
};

// Returns true if the process of a pidfd has ended; false without a pidfd (-1). Makes a system
// call. The life sign of a process (base/life_sign.h) shows its death earlier.
bool is_dead(int pidfd) noexcept;

class ShmGroup {
 public:
  struct Setup {
    std::string group;  // as errors name it
    std::vector<LocalRank> local_ranks;
    size_t self;  // this rank's local rank
    size_t chunk_bytes;
    bool oversubscribed;         // more ranks than usable processors here
    size_t threads;              // threads that share a large reduction or copy of this rank
    std::shared_ptr<void> keep;  // owns the memory of the regions and segments
    // Allocate and free blocks of this rank's segment. allocate() throws as
    // SharedSegment::allocate_reserved().
    std::function<std::byte*(size_t)> allocate;
    std::function<void(std::byte*)> free;
  };

  // REQUIRES: every rank has initialised its control region. Throws Error(kMismatch) if a region is
  // of another version or chunk size.
  explicit ShmGroup(Setup setup);

  // Declares that this rank no longer uses the regions of its local peers. Does nothing in a forked
  // child, which is no rank of the group.
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  size_t size() const noexcept { return local_ranks_.size(); }
  size_t self() const noexcept { return self_; }
  const LocalRank& local_rank(size_t index) const noexcept { return local_ranks_[index]; }
  const RegionLayout& layout() const noexcept { return layout_; }
  const std::string& group() const noexcept { return group_; }

  // Returns the slot that the next publish() publishes. REQUIRES: all_here().
  Slot& next_slot() noexcept { return *slot_at(self_, phase_ + 1); }
  void publish() noexcept;

  // Returns true if every rank has published the last phase that this rank has published.
  bool all_here() noexcept;
  std::vector<int> missing() const;  // group ranks that have not published this phase

  // Returns the slot that a local rank published in the last phase. REQUIRES: all_here().
  const Slot& slot(size_t index) const noexcept { return *slot_at(index, phase_); }

  Mailbox& mailbox(size_t from, size_t to) const noexcept {
    return *reinterpret_cast<Mailbox*>(region(from) + layout_.mail + to * layout_.mail_stride);
  }

  // Return the TransferLocations and the data of a slot.
  TransferLocation* locations(Slot& slot) const noexcept;
  const TransferLocation* locations(const Slot& slot) const noexcept;
  std::byte* data(Slot& slot) const noexcept;
  const std::byte* data(const Slot& slot) const noexcept;

  // Waits for all_here(), at most until `until`. Spins and yields first, unless the caller has
  // `polled` for long. Then sleeps on the doorbell, if ends() is still `ends_seen`. Any ring ends
  // the sleep, so the caller must check again. Returns all_here().
  bool sleep(Clock::time_point until, uint32_t ends_seen, bool polled = false);

  // Waits for messages: sleeps until the count of rings is no longer `seen`, at most until `until`.
  // Returns true if the count has changed. ring_messages(index) notifies local rank `index` of any
  // change to a message.
  uint32_t message_rings() const noexcept;
  bool sleep_messages(Clock::time_point until, uint32_t seen, bool polled = false);
  void ring_messages(size_t index) noexcept;

  // Wakes the sleeping threads of this process, so that they notice an abort, for example.
  void wake() noexcept;

  // Wakes the sleeping threads of this process because the process of a rank has ended. ends()
  // counts the calls: an operation that finds a new count checks its ranks.
  void wake_for_end() noexcept;
  uint32_t ends() const noexcept { return ends_.load(std::memory_order_acquire); }

  // Makes require_alive() call `found` with the group rank of each dead rank that it finds, before
  // it reports the death. Called before the first operation.
  void on_death(std::function<void(int rank)> found) { found_death_ = std::move(found); }

  // Throws if a rank has reported a failure: Error(kDeath) if the failure was a death, else
  // Error(kPeer). Reports and throws Error(kDeath) if one of `ranks`, for which `operation` waits,
  // is dead and `ready()` is still false. All ranks throw the text of the same report, unless the
  // rank that writes the report dies. Throws Error(kPeer) if one of `ranks` has left and `ready()`
  // is still false. Ignores ranks of other nodes.
  void require_alive(const std::vector<int>& ranks, const progress::Operation& operation,
                     const std::function<bool()>& ready);

  // Publishes that this rank destroys the group in good order.
  void leave() noexcept;

  // Returns the group ranks whose process has died before they left.
  std::vector<int> dead() const;

  // Returns the group ranks that have left.
  std::vector<int> left() const;

  // Reports a failure to the ranks of the node, and wakes them. `death`: the failure is the death
  // of another rank. Only the first report of the node counts. Returns the first report, or
  // `failure` if the writer of the first report has died.
  std::string report(const std::string& failure, bool death) noexcept;
  bool failed() const noexcept;

  // Throws the first report of the node, if there is one: Error(kDeath) or Error(kPeer).
  void require_no_report() const;

  std::byte* at(size_t index, uint64_t offset) const noexcept {
    return local_ranks_[index].segment + offset;
  }

  // Returns the address of `bytes` bytes at an offset in the segment of local rank `index`. Throws
  // Error(kMismatch) if the bytes are not all inside the segment.
  std::byte* address_in_segment(size_t index, uint64_t offset, size_t bytes) const;

  // Returns the offset of `address` in this rank's segment; no value if the bytes are not all
  // inside it.
  std::optional<uint64_t> offset_in_segment(const void* address, size_t bytes) const noexcept;

  std::byte* allocate(size_t bytes) const { return allocate_(bytes); }
  void free(std::byte* block) const { free_(block); }

  // Returns the object that shares this rank's large reductions and copies among threads.
  const kernels::Parallel& parallel() const noexcept { return parallel_; }

  // Returns the object that copies data into this rank's slots and messages, for other ranks to
  // read.
  kernels::CopyToPeers& copy_to_peers() noexcept { return copy_to_peers_; }

  // key_to(): the key of the transfer from this rank to local rank `index`. key_from(): the key of
  // the transfer from that rank to this one. A key is an odd hash of the sender and the receiver,
  // so both ranks compute the same key.
  uint64_t key_to(size_t index) const noexcept { return keys_[index].to; }
  uint64_t key_from(size_t index) const noexcept { return keys_[index].from; }

  // Return scratch arrays with room for an address of each local rank. Only the thread that drives
  // the operation may use them.
  std::vector<const void*>& sources() noexcept { return sources_; }
  std::vector<void*>& sinks() noexcept { return sinks_; }

  // Returns true if no local peer uses the region any more.
  static bool released(const std::byte* region, size_t local_ranks) noexcept;

 private:
  std::byte* region(size_t index) const noexcept { return at(index, local_ranks_[index].region); }
  Control& control(size_t index) const noexcept { return control_of(region(index)); }
  Slot* slot_at(size_t index, uint64_t phase) const noexcept {
    return reinterpret_cast<Slot*>(region(index) + layout_.slot + phase % 2 * layout_.slot_stride);
  }
  bool has_left(size_t index) const noexcept {
    return control(index).left.load(std::memory_order_acquire) != 0;
  }
  bool is_dead(size_t index) const noexcept;
  struct Keys {
    uint64_t to;
    uint64_t from;
  };
  static void ring(Doorbell& doorbell) noexcept;
  bool spin(Clock::time_point until, const std::function<bool()>& ready) const;

  const ForkGuard fork_;
  const std::string group_;
  const std::vector<LocalRank> local_ranks_;
  const size_t self_;
  const RegionLayout layout_;
  const bool oversubscribed_;
  const kernels::Parallel parallel_;
  const std::shared_ptr<void> keep_;
  const std::function<std::byte*(size_t)> allocate_;
  const std::function<void(std::byte*)> free_;
  kernels::CopyToPeers copy_to_peers_;
  std::vector<Keys> keys_;  // by local rank
  uint64_t phase_ = 0;      // the last phase that this rank has published
  size_t arrived_ = 0;      // local ranks that are known to have published phase_
  std::atomic<uint32_t> ends_ = 0;
  std::function<void(int rank)> found_death_;
  std::vector<const void*> sources_;
  std::vector<void*> sinks_;
};

}  // namespace hbm::communicator::shm
