#include "communicator/shm/streams.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "kernels/copy.h"

namespace hbm::shm {

Streams::Streams(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                 std::vector<Source> outgoing, const std::vector<size_t>& incoming, Cast cast)
    : PhasedOperation(std::move(shm_group), signature, count),
      outgoing_(std::move(outgoing)),
      multicast_(cast == Cast::kMulti),
      incoming_(incoming.size()) {
  for (size_t i = 0; i < incoming.size(); ++i) incoming_[i].count = incoming[i];
}

void Streams::begin() {
  Slot& slot = open();
  announce(slot);
  fill(slot, 0);
  shm_group_->publish();
}

// Chooses the way of each stream.
void Streams::announce(Slot& slot) {
  size_t streams = 0;  // equal on all ranks of a reduce_scatter, whose chunks must be alike
  for (const Source& source : outgoing_) streams += source.count > 0 ? 1 : 0;
  if (multicast_) streams = std::min<size_t>(streams, 1);
  const AreaLayout& layout = shm_group_->layout();
  const size_t room = layout.data_bytes / std::max<size_t>(streams, 1);
  chunk_ = std::min(layout.chunk_bytes, room / kCacheLine * kCacheLine);
  slot.chunk = chunk_;

  StreamLocation* locations = shm_group_->locations(slot);
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    const Source& source = outgoing_[i];
    const size_t bytes = source.count * element();
    locations[i] = {source.count, 0, StreamLocation::kSlots, 0};
    if (i == shm_group_->self() || bytes == 0) continue;
    const auto offset =
        bytes >= kZeroCopyBytes ? shm_group_->offset_in_segment(source.data, bytes) : std::nullopt;
    if (offset) {
      locations[i] = {source.count, *offset, StreamLocation::kZeroCopy, 0};
      slot.direct = 1;
      continue;
    }
    if (lanes_.empty() || !multicast_) lanes_.push_back({source, lanes_.size() * chunk_});
    locations[i].offset = lanes_.back().offset;
    slot.rounds = std::max<uint64_t>(slot.rounds, (bytes + chunk_ - 1) / chunk_);
  }
}

void Streams::fill(Slot& slot, size_t round) const {
  for (const SlotStream& lane : lanes_) {
    const size_t bytes = lane.source.count * element();
    const size_t done = round * chunk_;
    if (done >= bytes) continue;
    copy_bytes(shm_group_->data(slot) + lane.offset,
               static_cast<const std::byte*>(lane.source.data) + done,
               std::min(chunk_, bytes - done));
  }
}

// What the others chose.
void Streams::learn() {
  check(/*same_count=*/false);
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (i != shm_group_->self()) learn_from(i);
    rounds_ = std::max<size_t>(rounds_, shm_group_->slot(i).rounds);
    closing_ = closing_ || shm_group_->slot(i).direct != 0;
  }
  learned_ = true;
}

void Streams::learn_from(size_t index) {
  const Slot& slot = shm_group_->slot(index);
  const StreamLocation& place = shm_group_->locations(slot)[shm_group_->self()];
  Incoming& incoming = incoming_[index];
  check_stream(index, place.count, incoming.count);
  check_place(index);
  incoming.offset = place.offset;
  incoming.chunk = slot.chunk;
  if (place.kind == StreamLocation::kZeroCopy) {
    incoming.direct = shm_group_->direct(index, place, place.count * element());
  }
}

// Throws Error(kMismatch) unless what member `index` has announced makes sense: nothing is checked
// later.
void Streams::check_place(size_t index) const {
  const Slot& slot = shm_group_->slot(index);
  const StreamLocation& place = shm_group_->locations(slot)[shm_group_->self()];
  const size_t room = shm_group_->layout().data_bytes;
  const uint64_t bytes = place.count * element();  // what this rank takes
  const auto in_slots = [&] {
    return place.kind == StreamLocation::kSlots && place.offset <= room &&
           std::min(slot.chunk, bytes) <= room - place.offset &&
           slot.rounds >= (bytes + slot.chunk - 1) / slot.chunk;
  };
  const bool chunk = slot.chunk > 0 && slot.chunk <= room &&
                     (signature_.op != OpCode::kReduceScatter || slot.chunk == chunk_);
  const bool direct = place.kind == StreamLocation::kZeroCopy && slot.direct != 0;
  if (chunk && (direct || in_slots()) && slot.rounds <= most_rounds(index)) return;
  throw Error(ErrorKind::kMismatch, shm_group_->member(index).name + " of " + shm_group_->group() +
                                        " names a stream of " + std::to_string(bytes) +
                                        " bytes at " + std::to_string(place.offset) +
                                        " of its slots, which have " + std::to_string(room) +
                                        ", in " + std::to_string(slot.rounds) + " rounds of " +
                                        std::to_string(slot.chunk) + ", for " + describe() +
                                        "; a stray store may have spoiled its shared memory");
}

// Rounds that the streams of member `index` can need, by its Places, or 1. REQUIRES: its chunk is
// not 0.
uint64_t Streams::most_rounds(size_t index) const {
  const Slot& slot = shm_group_->slot(index);
  const StreamLocation* const locations = shm_group_->locations(slot);
  uint64_t most = 1;
  if (slot.rounds <= most) return most;  // mostly: the Places of the others need not be fetched
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (i == index || locations[i].kind != StreamLocation::kSlots) continue;
    most = std::max(most, (locations[i].count * element() + slot.chunk - 1) / slot.chunk);
  }
  return most;
}

Progress Streams::next_phase() {
  if (!learned_) learn();
  if (round_ < rounds_ && !deliver(round_)) {
    if (shm_group_->failed()) shm_group_->require_alive({}, *this, [] { return false; });
    return Progress::kActive;
  }
  ++round_;
  if (round_ < rounds_) {
    Slot& slot = open();
    fill(slot, round_);
    shm_group_->publish();
    return Progress::kActive;
  }
  if (!closing_) return Progress::kDone;
  closing_ = false;
  open();
  shm_group_->publish();
  return Progress::kActive;
}

Streams::Part Streams::part(size_t index, size_t round) const {
  const Incoming& stream = incoming_[index];
  const size_t bytes = stream.count * element();
  if (stream.direct != nullptr) return {stream.direct, 0, round == 0 ? bytes : 0};
  const size_t offset = round * stream.chunk;
  if (offset >= bytes) return {nullptr, 0, 0};
  return {shm_group_->data(shm_group_->slot(index)) + stream.offset, offset,
          std::min<size_t>(stream.chunk, bytes - offset)};
}

// In an alltoall the others' counts may differ from this rank's, and make more rounds.
bool Streams::self_sufficient() const {
  if (signature_.op == OpCode::kAlltoall) return false;
  const size_t room = shm_group_->layout().chunk_bytes / shm_group_->size();
  const size_t most = std::min(room, kZeroCopyBytes - 1) / element();
  return std::all_of(outgoing_.begin(), outgoing_.end(),
                     [&](const Source& source) { return source.count <= most; }) &&
         std::all_of(incoming_.begin(), incoming_.end(),
                     [&](const Incoming& stream) { return stream.count <= most; });
}

}  // namespace hbm::shm
