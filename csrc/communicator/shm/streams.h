// The collectives within a node in which each member has one stream for each other. What it sends
// may lie in its segment, where the others read it, or go through the slots, chunk by chunk. The
// sender chooses for each stream, and says so in the StreamLocations of its first slot. What lies
// in its segment it copies itself where the receiver shows a destination, as the root of a gather
// does, which would otherwise copy alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/pieces.h"
#include "communicator/shm/phased_operation.h"

namespace hbm::shm {

class Streams : public PhasedOperation {
 public:
  void begin() override;
  bool peers_may_write() const final { return shows_destination_; }
  bool self_sufficient() const final;

 protected:
  // Where the data of a stream to this rank comes from.
  struct Incoming {
    size_t count = 0;                      // elements that this rank expects; set by the subclass
    const std::byte* zero_copy = nullptr;  // all of it; null: it comes through slots
    uint64_t offset = 0;                   // in a slot's data
    uint64_t chunk = 0;                    // bytes a slot; not 0
    bool put_by_sender = false;            // where it belongs
  };

  enum class Cast {
    kUni,    // a stream of its own for each member
    kMulti,  // one stream for all who have a Source, which is the same
  };

  // `outgoing`, `incoming`: by member, the streams to send (this rank's own is not sent) and the
  // elements to receive.
  Streams(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
          std::vector<Source> outgoing, const std::vector<size_t>& incoming, Cast cast);

  // Copies bytes of the stream to member `index`, from byte `offset` on, into a slot.
  virtual void copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const;

  // The same of pieces that make a stream.
  void copy_pieces_in(const Sources& pieces, size_t offset, size_t bytes, std::byte* slot) const;

  // Where member `index` may put its stream to this rank; null: nowhere.
  virtual std::byte* destination(size_t /*index*/) const { return nullptr; }

  // Whether all members must cut their streams in the same way.
  virtual bool chunks_are_alike() const { return false; }

  // Uses what came with round `round`, kBytesPerPoll at a time; false until it has used all of it.
  virtual bool deliver(size_t round) = 0;

  // The part of member `index`'s stream that came with a round; no bytes if none did.
  struct Part {
    const std::byte* data;
    size_t offset;  // bytes, in the stream
    size_t bytes;
  };
  Part part(size_t index, size_t round) const;
  // 2 where each member has as much to send as to receive, 1 where one of these is larger.
  size_t sides() const { return signature_.op == OpCode::kAlltoall ? 2 : 1; }
  // A stream to this rank.
  const Incoming& incoming(size_t index) const { return incoming_[index]; }
  size_t chunk() const { return chunk_; }
  size_t rounds() const { return rounds_; }  // known in deliver()

 private:
  Progress next_phase() final;
  void announce(Slot& slot);
  size_t chunk_of(size_t bytes, size_t room) const;
  void show_destinations(Slot& slot);
  void fill(Slot& slot, size_t round) const;
  void learn();
  void learn_from(size_t index);
  void check_place(size_t index) const;
  uint64_t most_rounds(size_t index) const;
  bool put();

  // A stream of this rank's that goes through the slots.
  struct SlotStream {
    size_t member;  // that it goes to; of a multicast, the first
    size_t offset;  // in a slot's data
  };

  const std::vector<Source> outgoing_;
  const bool multicast_;
  std::vector<Incoming> incoming_;  // by member
  std::vector<SlotStream> slot_streams_;
  size_t chunk_ = 0;   // bytes of a stream in a slot
  size_t rounds_ = 1;  // of the whole group
  size_t round_ = 0;
  bool learned_ = false;
  bool closing_ = false;  // some member's stream is read in its segment
  // Some member sends another number of elements than its receiver expects. That one reports it;
  // this rank waits for the report, and does not return as if all were well.
  bool unbalanced_ = false;
  bool shows_destination_ = false;
  Sink destination_{};            // where this rank puts its stream
  size_t destination_bytes_ = 0;  // of all streams to there, were they alike
  const std::byte* next_{};       // of that stream
};

// Moves a stream from each member to each other. broadcast, allgather, gather, scatter, alltoall
// and barrier are this operation.
class StreamExchange : public Streams {
 public:
  // `outgoing` and `incoming` by member; what a member has for itself is copied in begin() or,
  // where it is much, while the rank waits, and the rest at the end.
  StreamExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                 std::vector<Source> outgoing, std::vector<Sink> incoming, Cast cast);

  using Streams::Cast;

  void begin() override;

 protected:
  // Copies bytes that came from member `index` to where they belong: from byte `offset` on.
  virtual void copy_out(size_t index, size_t offset, size_t bytes, const std::byte* from) const;

  size_t footprint() const { return footprint_; }

 private:
  std::byte* destination(size_t index) const override;
  bool deliver(size_t round) override;
  bool meanwhile() override;
  size_t own_bytes() const;  // that this rank has for itself, and must copy
  void copy_own(size_t most);

  const Source own_source_;
  const std::vector<Sink> sinks_;
  size_t footprint_ = 0;   // bytes that the caches would have to hold
  size_t distance_ = 1;    // to the member whose part is copied next
  size_t copied_ = 0;      // bytes of that part
  size_t own_copied_ = 0;  // bytes
};

// A multicast of streams in pieces. What a member has for itself is not copied.
class PieceExchange final : public StreamExchange {
 public:
  // `outgoing`: what this rank has for every other member; `incoming`: by member.
  PieceExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                Sources outgoing, std::vector<Sinks> incoming);

 private:
  void copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const override;
  void copy_out(size_t index, size_t offset, size_t bytes, const std::byte* from) const override;

  const Sources pieces_;
  const std::vector<Sinks> sinks_;
};

// reduce_scatter within a node: every member reduces what the others have for it, in the order of
// the members, straight from their segments or from their slots.
class ShmReduceScatter : public Streams {
 public:
  // `count`: elements, as errors report them. `how` may differ from the operator in the signature,
  // as it does where a part of a mean is made.
  ShmReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                   const std::vector<Source>& inputs, void* out, Combining how);

 protected:
  // This rank's own input from byte `offset` on, as far as it lies in one place: at most `bytes`.
  virtual std::span<const std::byte> own(size_t offset, size_t bytes) const;

 private:
  bool chunks_are_alike() const override { return true; }
  bool deliver(size_t round) override;

  const Source own_;
  std::byte* const out_;
  const Combining how_;
  size_t reduced_ = 0;  // bytes of the result
};

// The same of inputs in pieces.
class PieceReduceScatter final : public ShmReduceScatter {
 public:
  PieceReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                     std::vector<Sources> inputs, void* out, Combining how);

 private:
  void copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const override;
  std::span<const std::byte> own(size_t offset, size_t bytes) const override;

  const std::vector<Sources> pieces_;
};

}  // namespace hbm::shm
