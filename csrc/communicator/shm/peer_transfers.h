// The collectives within a node in which each rank has one transfer to each other rank. The sender
// chooses, for each transfer, how its data moves, and records the choice in the TransferLocations
// of its first slot. The receiver reads data of kZeroCopyBytes or more directly, if it is in the
// sender's segment. Other data goes through the slots, chunk by chunk. The root of a gather may
// show destinations in its segment. A sender whose data is in its segment then copies the data to
// the destination itself. So the root does not copy the data of all ranks alone.
//
// Threads: one thread at a time, as for Operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/scatter_gather.h"
#include "communicator/shm/phased_operation.h"

namespace hbm::communicator::shm {

class PeerTransfers : public PhasedOperation {
 public:
  void begin() override;
  bool peers_may_write() const final { return shows_destination_; }
  bool self_sufficient() const final;

 protected:
  // The location of the data of a transfer to this rank.
  struct Incoming {
    size_t count = 0;                      // elements that this rank expects; set by the subclass
    const std::byte* zero_copy = nullptr;  // the whole data; null: it comes through slots
    uint64_t offset = 0;                   // in a slot's data
    uint64_t chunk = 0;                    // bytes of the transfer in one slot; not 0
    bool put_by_sender = false;            // the sender copies the data to destination()
  };

  enum class Cast {
    kUni,    // a separate transfer to each local rank
    kMulti,  // one transfer, the same to all local ranks with a Source
  };

  // `outgoing`: the transfers to send, by local rank; the transfer to this rank itself is not sent.
  // `incoming`: the elements to receive, by local rank. `count`: the elements that errors report.
  PeerTransfers(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                std::vector<Source> outgoing, const std::vector<size_t>& incoming, Cast cast);

  // Copies bytes of the transfer to local rank `index`, from byte `offset` on, into a slot.
  virtual void copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const;

  // Copies bytes of a scatter/gather list, from byte `offset` on, into a slot.
  void copy_entries_in(const Sources& entries, size_t offset, size_t bytes, std::byte* slot) const;

  // Returns the address to which local rank `index` may copy its transfer to this rank; null if
  // there is none.
  virtual std::byte* destination(size_t /*index*/) const { return nullptr; }

  // Returns true if all ranks must cut their transfers into equal chunks.
  virtual bool chunks_are_alike() const { return false; }

  // Copies or reduces the data of round `round`: the slots of this phase, and zero-copy data in the
  // senders' segments. Each call takes a slice, limited by kBytesPerPoll. Returns false until all
  // data of the round is used.
  virtual bool deliver(size_t round) = 0;

  // The part of a transfer that has arrived in a round; `bytes` is 0 if none has.
  struct Part {
    const std::byte* data;
    size_t offset;  // bytes, in the transfer
    size_t bytes;
  };
  Part part(size_t index, size_t round) const;
  // Returns the number of tensors for each local peer that the caches would have to hold: 2 in an
  // alltoall (input and output), else 1.
  size_t sides() const { return signature_.op == OpCode::kAlltoall ? 2 : 1; }
  // Returns the transfer from local rank `index` to this rank.
  const Incoming& incoming(size_t index) const { return incoming_[index]; }
  size_t chunk() const { return chunk_; }
  size_t rounds() const { return rounds_; }  // valid in deliver()

 private:
  progress::Progress next_phase() final;
  void announce(Slot& slot);
  size_t chunk_of(size_t bytes, size_t room) const;
  void show_destinations(Slot& slot);
  void fill(Slot& slot, size_t round) const;
  void learn();
  void learn_from(size_t index);
  void check_location(size_t index) const;
  uint64_t most_rounds(size_t index) const;
  bool put();

  // A transfer from this rank through the slots.
  struct SlotTransfer {
    size_t to;      // the receiver's local rank; in a multicast, the first receiver's
    size_t offset;  // in a slot's data
  };

  const std::vector<Source> outgoing_;
  const bool multicast_;
  std::vector<Incoming> incoming_;  // by local rank
  std::vector<SlotTransfer> slot_transfers_;
  size_t chunk_ = 0;   // bytes of a transfer in a slot
  size_t rounds_ = 1;  // the most that any local rank needs
  size_t round_ = 0;
  bool learned_ = false;
  bool needs_completion_barrier_ = false;  // some rank reads a transfer in its sender's segment
  // True if the counts of some sender and its receiver differ. That receiver reports the error.
  // This rank waits for the report, and does not return as if the operation had succeeded.
  bool unbalanced_ = false;
  bool shows_destination_ = false;
  Sink destination_{};            // the part of the root's output that this rank has yet to fill
  size_t destination_bytes_ = 0;  // the root's output, if every rank sends as much as this rank
  const std::byte* next_{};       // the next byte to copy to destination_
};

// Moves at most one transfer from each rank to each other rank. The collectives broadcast,
// allgather, gather, scatter, alltoall and barrier are this operation.
class PeerExchange : public PeerTransfers {
 public:
  // `outgoing` and `incoming`: by local rank. Copies this rank's transfer to itself in begin(), if
  // it is below kOverlappedOwnCopyBytes. Copies a larger transfer in slices while the rank waits,
  // and the rest at the end.
  PeerExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
               std::vector<Source> outgoing, std::vector<Sink> incoming, Cast cast);

  using PeerTransfers::Cast;

  void begin() override;

 protected:
  // Copies bytes that local rank `index` has sent into the sink for that rank, at byte `offset`.
  virtual void copy_out(size_t index, size_t offset, size_t bytes, const std::byte* from) const;

  size_t footprint() const { return footprint_; }

 private:
  std::byte* destination(size_t index) const override;
  bool deliver(size_t round) override;
  bool meanwhile() override;
  size_t own_bytes() const;  // bytes of this rank's transfer to itself, if they must be copied
  void copy_own(size_t most);

  const Source own_source_;
  const std::vector<Sink> sinks_;
  size_t footprint_ = 0;   // bytes that the caches would have to hold
  size_t distance_ = 1;    // from this rank to the local rank whose part is copied next
  size_t copied_ = 0;      // bytes of that local rank's part already copied
  size_t own_copied_ = 0;  // bytes of own_bytes() already copied
};

// A multicast of scatter/gather lists to the other local ranks.
class ScatterGatherExchange final : public PeerExchange {
 public:
  // `outgoing`: the transfer to every other rank. `incoming`: by local rank; empty for this rank.
  ScatterGatherExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                        size_t count, Sources outgoing, std::vector<Sinks> incoming);

 private:
  void copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const override;
  void copy_out(size_t index, size_t offset, size_t bytes, const std::byte* from) const override;

  const Sources entries_;
  const std::vector<Sinks> sinks_;
};

// reduce_scatter within a node: every rank reduces the inputs that all ranks have for it, in the
// order of local ranks, directly from their segments or slots.
class ShmReduceScatter : public PeerTransfers {
 public:
  // `count`: the elements that errors report. `how` may differ from the operator in the signature,
  // as in one stage of a mean.
  ShmReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                   const std::vector<Source>& inputs, void* out, Combining how);

 protected:
  // Returns this rank's own input from byte `offset` on: a contiguous part of at most `bytes`.
  virtual std::span<const std::byte> own(size_t offset, size_t bytes) const;

 private:
  bool chunks_are_alike() const override { return true; }
  bool deliver(size_t round) override;

  const Source own_;
  std::byte* const out_;
  const Combining how_;
  size_t reduced_ = 0;  // bytes of the result that are done
};

// reduce_scatter of inputs that are scatter/gather lists.
class ScatterGatherReduceScatter final : public ShmReduceScatter {
 public:
  ScatterGatherReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                             size_t count, std::vector<Sources> inputs, void* out, Combining how);

 private:
  void copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const override;
  std::span<const std::byte> own(size_t offset, size_t bytes) const override;

  const std::vector<Sources> entries_;
};

}  // namespace hbm::communicator::shm
