// The ranks of a group that share this node's memory, and how they keep in step.
//
// The clock of a ShmGroup is the phase. In each phase every member publishes one slot of its area,
// then waits until all have. Slots alternate between two, so the one of phase t is free again at t
// + 2: a member publishes t + 1 only after it has read the slots of t, and t + 2 needs everybody's
// t + 1. All collectives are sequences of phases (communicator/shm/phased_operation.h), one after
// the other, so nothing has to be cleared or agreed on in between.
//
// Memory order: publish() releases the slot by its store of `phase`, all_here() acquires it. A
// fence after that store, all_here()'s loads and the doorbell's `asleep` are sequentially
// consistent: either the sleeper sees the last member's phase before it sleeps, or that member sees
// that it sleeps and rings. (Were the store itself of that order, it would wait for the stores
// before it, and often for the slot's cache line once more, which a reader has fetched meanwhile.)
// Transfers have the bell's count in place of the phase. docs/design/shared-memory.md has the whole
// argument.
//
// Threads: the members' segments are shared by processes; in this one, one thread at a time uses
// the phases, and any thread may call the rest.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fork.h"
#include "communicator/shm/area.h"
#include "kernels/copy_to_peers.h"
#include "kernels/parallel.h"
#include "progress/operation.h"

namespace hbm::shm {

using Clock = std::chrono::steady_clock;

struct ShmMember {
  int rank;            // in the group
  std::string name;    // for errors: "rank 3 (pid 4711 on host)"
  std::byte* segment;  // where this process has it mapped
  size_t segment_bytes;
  size_t area;     // offset of the group's area in it
  int pidfd = -1;  // readable (POLLIN) once the process is dead; -1: this process
};

// Whether the process of a pidfd has ended; not if there is none (-1). Costs a system call.
bool is_dead(int pidfd) noexcept;

class ShmGroup {
 public:
  struct Setup {
    std::string group;  // as errors name it
    std::vector<ShmMember> members;
    size_t self;  // index of this rank among them
    size_t chunk_bytes;
    bool crowded;                // more ranks than cores here
    size_t threads;              // that share this rank's large reductions and copies
    std::shared_ptr<void> keep;  // what the members' memory belongs to
    // Blocks of this rank's segment; allocate() throws as SharedSegment::allocate_in_front().
    std::function<std::byte*(size_t)> allocate;
    std::function<void(std::byte*)> free;
  };

  // REQUIRES: every member has formatted its area. Throws Error(kMismatch) if one is of another
  // version or chunk size.
  explicit ShmGroup(Setup setup);

  // Tells the others that this rank will not look at their areas again. (In a forked child, which
  // is none of them, does nothing.)
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  size_t size() const noexcept { return members_.size(); }
  size_t self() const noexcept { return self_; }
  const ShmMember& member(size_t index) const noexcept { return members_[index]; }
  const AreaLayout& layout() const noexcept { return layout_; }
  const std::string& group() const noexcept { return group_; }

  // The slot that the next publish() shows. REQUIRES: all_here().
  Slot& next_slot() noexcept { return *slot_at(self_, phase_ + 1); }
  void publish() noexcept;

  // True once every member has published the last phase of this rank.
  bool all_here() noexcept;
  std::vector<int> missing() const;  // group ranks of those who have not

  // The slot that a member published with the last phase. REQUIRES: all_here().
  const Slot& slot(size_t index) const noexcept { return *slot_at(index, phase_); }

  Mailbox& mailbox(size_t from, size_t to) const noexcept {
    return *reinterpret_cast<Mailbox*>(area(from) + layout_.mail + to * layout_.mail_stride);
  }

  // The StreamLocations and the data of a slot.
  StreamLocation* locations(Slot& slot) const noexcept;
  const StreamLocation* locations(const Slot& slot) const noexcept;
  std::byte* data(Slot& slot) const noexcept;
  const std::byte* data(const Slot& slot) const noexcept;

  // Waits for all_here(): spins and yields, unless the caller has `polled` for long, then sleeps on
  // the doorbell, at most until `until`. Any ring of it ends the sleep, so the caller looks again.
  // Returns all_here().
  bool sleep(Clock::time_point until, bool polled = false);

  // The same for transfers, in which ring_transfers(index) tells member `index` of anything new:
  // sleeps until the count of rings is no longer `seen`, and returns true if it is not.
  uint32_t transfer_rings() const noexcept;
  bool sleep_transfers(Clock::time_point until, uint32_t seen, bool polled = false);
  void ring_transfers(size_t index) noexcept;

  // Wakes those of this process that sleep, to look at what else has changed.
  void wake() noexcept;

  // Throws if somebody has reported a failure: Error(kDeath) if that was a death, else
  // Error(kPeer). Reports and throws Error(kDeath) if one of `ranks`, for which `operation` waits,
  // is dead and `ready()` is still false. Every member throws the same text. Ranks that are not
  // members are passed over.
  void require_alive(const std::vector<int>& ranks, const Operation& operation,
                     const std::function<bool()>& ready);

  // Tells the others that this rank destroys the group in good order.
  void leave() noexcept;

  // Ranks whose process has ended before they left.
  std::vector<int> dead() const;

  // Ranks that have left.
  std::vector<int> left() const;

  // Reports a failure of this rank to the others of the node, and wakes them. The first report of
  // all counts; returns it.
  std::string report(const std::string& failure, bool death) noexcept;
  bool failed() const noexcept;

  std::byte* at(size_t index, uint64_t offset) const noexcept {
    return members_[index].segment + offset;
  }

  // The address of `bytes` bytes at an offset that member `index` names in its segment. Throws
  // Error(kMismatch) if they do not lie in it.
  std::byte* address_in_segment(size_t index, uint64_t offset, size_t bytes) const;

  // Where `address` lies in this rank's segment; nothing if it does not.
  std::optional<uint64_t> offset_in_segment(const void* address, size_t bytes) const noexcept;

  std::byte* allocate(size_t bytes) const { return allocate_(bytes); }
  void free(std::byte* block) const { free_(block); }

  // Does this rank's large reductions and copies.
  const Parallel& parallel() const noexcept { return parallel_; }

  // Copies what the others read into this rank's slots and messages.
  CopyToPeers& copy_to_peers() noexcept { return copy_to_peers_; }

  // Returns the key of the stream from this rank to member `index`, or from there to here. Keys are
  // odd hashes of the pair of ranks, the same on both ranks.
  uint64_t key_to(size_t index) const noexcept { return keys_[index].to; }
  uint64_t key_from(size_t index) const noexcept { return keys_[index].from; }

  // Room for an address of each member, for whoever drives.
  std::vector<const void*>& sources() noexcept { return sources_; }
  std::vector<void*>& sinks() noexcept { return sinks_; }

  // True once no neighbour looks at this rank's area any more.
  static bool released(const std::byte* area, size_t members) noexcept;

 private:
  std::byte* area(size_t index) const noexcept { return at(index, members_[index].area); }
  Control& control(size_t index) const noexcept { return *reinterpret_cast<Control*>(area(index)); }
  Slot* slot_at(size_t index, uint64_t phase) const noexcept {
    return reinterpret_cast<Slot*>(area(index) + layout_.slot + phase % 2 * layout_.slot_stride);
  }
  bool has_left(size_t index) const noexcept {
    return control(index).left.load(std::memory_order_acquire) != 0;
  }
  struct Keys {
    uint64_t to;
    uint64_t from;
  };
  static void ring(Doorbell& doorbell) noexcept;
  bool spin(Clock::time_point until, const std::function<bool()>& ready) const;
  [[noreturn]] void throw_failure() const;

  const ForkGuard fork_;
  const std::string group_;
  const std::vector<ShmMember> members_;
  const size_t self_;
  const AreaLayout layout_;
  const bool crowded_;
  const Parallel parallel_;
  const std::shared_ptr<void> keep_;
  const std::function<std::byte*(size_t)> allocate_;
  const std::function<void(std::byte*)> free_;
  CopyToPeers copy_to_peers_;
  std::vector<Keys> keys_;  // by member
  uint64_t phase_ = 0;      // the last one that this rank published
  size_t arrived_ = 0;      // members that are known to have published phase_
  std::vector<const void*> sources_;
  std::vector<void*> sinks_;
};

}  // namespace hbm::shm
