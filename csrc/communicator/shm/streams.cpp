#include "communicator/shm/streams.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "communicator/shm/tuning.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "kernels/tuning.h"

namespace hbm::shm {
namespace {

// Returns the quotient, rounded up.
size_t divided(size_t dividend, size_t divisor) { return (dividend + divisor - 1) / divisor; }

std::vector<size_t> counts(const std::vector<Sink>& sinks) {
  std::vector<size_t> found;
  for (const Sink& sink : sinks) found.push_back(sink.count);
  return found;
}

// A stream in pieces as one with an address, which only a single piece has.
template <class Piece>
Piece whole(const std::vector<Piece>& pieces) {
  return pieces.size() == 1 ? pieces.front() : Piece{nullptr, count_of(pieces)};
}

template <class Piece>
std::vector<Piece> wholes(const std::vector<std::vector<Piece>>& streams) {
  std::vector<Piece> found;
  for (const auto& pieces : streams) found.push_back(whole(pieces));
  return found;
}

}  // namespace

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
  show_destinations(slot);
  fill(slot, 0);
  shm_group_->publish();
}

// Chooses the way of each stream.
void Streams::announce(Slot& slot) {
  size_t streams = 0;
  size_t largest = 0;  // elements
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    const size_t count = outgoing_[i].count;
    // With the own part their number is the same on all ranks of a reduce_scatter.
    const bool has_room = i != shm_group_->self() || chunks_are_alike();
    if (count > 0 && has_room) ++streams;
    largest = std::max(largest, count);
  }
  if (multicast_) streams = std::min<size_t>(streams, 1);
  const size_t room = shm_group_->layout().data_bytes / std::max<size_t>(streams, 1);
  chunk_ = chunk_of(largest * element(), room / kCacheLine * kCacheLine);
  slot.chunk = chunk_;
  slot.balance = 0;

  StreamLocation* locations = shm_group_->locations(slot);
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    const Source& source = outgoing_[i];
    const size_t bytes = source.count * element();
    locations[i] = {source.count, 0, StreamLocation::kSlots, 0};
    if (i == shm_group_->self()) continue;
    slot.balance += shm_group_->key_to(i) * source.count;
    slot.balance -= shm_group_->key_from(i) * incoming_[i].count;
    if (bytes == 0) continue;
    const auto offset =
        bytes >= kZeroCopyBytes ? shm_group_->offset_in_segment(source.data, bytes) : std::nullopt;
    if (offset) {
      locations[i] = {source.count, *offset, StreamLocation::kZeroCopy, 0};
      slot.zero_copy = 1;
      continue;
    }
    if (slot_streams_.empty() || !multicast_)
      slot_streams_.push_back({i, slot_streams_.size() * chunk_});
    locations[i].offset = slot_streams_.back().offset;
    slot.rounds = std::max<uint64_t>(slot.rounds, divided(bytes, chunk_));
  }
}

// The bytes of each stream in a slot where there is room for `room`, the largest having `bytes`: at
// most half of them, so that the receiver copies one half while this rank copies the other. Large
// tensors need the cache for themselves. (A threshold that follows the size of the cache made no
// difference.)
size_t Streams::chunk_of(size_t bytes, size_t room) const {
  const size_t least = std::min(shm_group_->layout().chunk_bytes, room);
  if (chunks_are_alike()) return least;  // where the members' `bytes` may differ by mistake
  const bool large = sides() * shm_group_->size() * bytes >= kNonTemporalFromAtMostBytes;
  const size_t most = large ? least : std::clamp(divided(bytes, 2), least, room);
  const size_t rounds = std::max<size_t>(divided(bytes, most), 1);
  return std::max<size_t>(divided(divided(bytes, rounds), kCacheLine), 1) * kCacheLine;
}

void Streams::show_destinations(Slot& slot) {
  StreamLocation* locations = shm_group_->locations(slot);
  for (size_t i = 0; i < incoming_.size(); ++i) {
    const size_t bytes = incoming_[i].count * element();
    if (i == shm_group_->self() || bytes < kZeroCopyBytes || outgoing_[i].count > 0) continue;
    const std::byte* const place = destination(i);
    const auto offset = shm_group_->offset_in_segment(place, bytes);
    if (!offset) continue;
    locations[i] = {incoming_[i].count, *offset, StreamLocation::kDestination, 0};
    shows_destination_ = true;
  }
}

void Streams::fill(Slot& slot, size_t round) const {
  for (const SlotStream& stream : slot_streams_) {
    const size_t bytes = outgoing_[stream.member].count * element();
    const size_t done = round * chunk_;
    if (done >= bytes) continue;
    copy_in(stream.member, done, std::min(chunk_, bytes - done),
            shm_group_->data(slot) + stream.offset);
  }
}

void Streams::copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const {
  shm_group_->copy_to_peers()(slot, static_cast<const std::byte*>(outgoing_[index].data) + offset,
                              bytes);
}

void Streams::copy_pieces_in(const Sources& pieces, size_t offset, size_t bytes,
                             std::byte* slot) const {
  visit_pieces(pieces, element(), offset, bytes, [&](const Source& piece, size_t start, size_t n) {
    shm_group_->copy_to_peers()(slot, static_cast<const std::byte*>(piece.data) + start, n);
    slot += n;
  });
}

// Reads how each member sends: zero-copy or by chunks, and in how many rounds.
void Streams::learn() {
  check(/*same_count=*/false);
  uint64_t balance = 0;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    balance += shm_group_->slot(i).balance;
    if (i != shm_group_->self()) learn_from(i);
    rounds_ = std::max<size_t>(rounds_, shm_group_->slot(i).rounds);
    closing_ = closing_ || shm_group_->slot(i).zero_copy != 0;
  }
  unbalanced_ = balance != 0;
  learned_ = true;
}

void Streams::learn_from(size_t index) {
  const Slot& slot = shm_group_->slot(index);
  const StreamLocation& place = shm_group_->locations(slot)[shm_group_->self()];
  const Slot& own_slot = shm_group_->slot(shm_group_->self());
  const StreamLocation& own = shm_group_->locations(own_slot)[index];
  Incoming& incoming = incoming_[index];
  const bool destination = place.kind == StreamLocation::kDestination;
  check_stream(index, destination ? 0 : place.count, incoming.count);
  check_place(index);
  if (destination && own.kind == StreamLocation::kZeroCopy) {
    check_stream(index, place.count, own.count);
    destination_ = {shm_group_->address_in_segment(index, place.offset, own.count * element()),
                    own.count};
    destination_bytes_ = own.count * element() * shm_group_->size();
    next_ = static_cast<const std::byte*>(outgoing_[index].data);
  }
  incoming.put_by_sender =
      own.kind == StreamLocation::kDestination && place.kind == StreamLocation::kZeroCopy;
  incoming.offset = place.offset;
  incoming.chunk = slot.chunk;
  if (place.kind == StreamLocation::kZeroCopy) {
    incoming.zero_copy =
        shm_group_->address_in_segment(index, place.offset, place.count * element());
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
           slot.rounds >= divided(bytes, slot.chunk);
  };
  const bool chunk =
      slot.chunk > 0 && slot.chunk <= room && (!chunks_are_alike() || slot.chunk == chunk_);
  const bool zero_copy = place.kind == StreamLocation::kZeroCopy && slot.zero_copy != 0;
  const bool destination =
      place.kind == StreamLocation::kDestination && signature_.op == OpCode::kGather;
  if (chunk && (zero_copy || destination || in_slots()) && slot.rounds <= most_rounds(index))
    return;
  throw Error(ErrorKind::kMismatch, shm_group_->member(index).name + " of " + shm_group_->group() +
                                        " names a stream of " + std::to_string(bytes) +
                                        " bytes at " + std::to_string(place.offset) +
                                        " of its slots, which have " + std::to_string(room) +
                                        ", in " + std::to_string(slot.rounds) + " rounds of " +
                                        std::to_string(slot.chunk) + ", for " + describe() +
                                        "; a stray store may have spoiled its shared memory");
}

// Rounds that the streams of member `index` can need, by its StreamLocations, or 1. REQUIRES: its
// chunk is not 0.
uint64_t Streams::most_rounds(size_t index) const {
  const Slot& slot = shm_group_->slot(index);
  const StreamLocation* const locations = shm_group_->locations(slot);
  uint64_t most = 1;
  if (slot.rounds <= most)
    return most;  // mostly: the StreamLocations of the others need not be fetched
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (i == index || locations[i].kind != StreamLocation::kSlots) continue;
    most = std::max(most, divided(locations[i].count * element(), slot.chunk));
  }
  return most;
}

Progress Streams::next_phase() {
  if (!learned_) learn();
  if (unbalanced_) {
    if (shm_group_->failed()) shm_group_->require_alive({}, *this, [] { return false; });
    return Progress::kIdle;
  }
  if (!put() || (round_ < rounds_ && !deliver(round_))) {
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

// Copies up to kBytesPerPoll of this rank's stream to its destination; true if no more is left.
bool Streams::put() {
  const size_t left = destination_.count * element();
  if (left == 0) return true;
  const size_t slice = std::min(left, kBytesPerPoll);
  shm_group_->parallel().copy(destination_.data, next_, slice, destination_bytes_);
  destination_ = {static_cast<std::byte*>(destination_.data) + slice,
                  destination_.count - slice / element()};
  next_ += slice;
  return slice == left;
}

Streams::Part Streams::part(size_t index, size_t round) const {
  const Incoming& stream = incoming_[index];
  const size_t bytes = stream.count * element();
  if (stream.put_by_sender) return {nullptr, 0, 0};
  if (stream.zero_copy != nullptr) return {stream.zero_copy, 0, round == 0 ? bytes : 0};
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

StreamExchange::StreamExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                               size_t count, std::vector<Source> outgoing,
                               std::vector<Sink> incoming, Cast cast)
    : Streams(shm_group, signature, count, outgoing, counts(incoming), cast),
      own_source_(outgoing[shm_group->self()]),
      sinks_(std::move(incoming)) {
  for (const Sink& sink : sinks_) footprint_ += sides() * sink.count * element();
}

void StreamExchange::begin() {
  Streams::begin();
  if (own_bytes() < kOverlappedOwnCopyBytes) copy_own(own_bytes());
}

bool StreamExchange::meanwhile() {
  if (own_copied_ == own_bytes()) return false;
  copy_own(kOwnCopyPieceBytes);
  return true;
}

size_t StreamExchange::own_bytes() const {
  const Sink& own = sinks_[shm_group_->self()];
  return own.data == own_source_.data ? 0 : own.count * element();
}

void StreamExchange::copy_own(size_t most) {
  const size_t bytes = std::min(most, own_bytes() - own_copied_);
  if (bytes == 0) return;
  shm_group_->parallel().copy(
      static_cast<std::byte*>(sinks_[shm_group_->self()].data) + own_copied_,
      static_cast<const std::byte*>(own_source_.data) + own_copied_, bytes, footprint_);
  own_copied_ += bytes;
}

std::byte* StreamExchange::destination(size_t index) const {
  if (signature_.op != OpCode::kGather) return nullptr;
  return static_cast<std::byte*>(sinks_[index].data);
}

bool StreamExchange::deliver(size_t round) {
  size_t room = kBytesPerPoll;
  for (; distance_ < shm_group_->size(); ++distance_) {
    const size_t peer = (shm_group_->self() + distance_) % shm_group_->size();
    const Part came = part(peer, round);
    const size_t slice = std::min(came.bytes - copied_, room);
    if (slice > 0) copy_out(peer, came.offset + copied_, slice, came.data + copied_);
    room -= slice;
    copied_ += slice;
    if (copied_ < came.bytes) return false;
    copied_ = 0;
  }
  if (round + 1 == rounds()) {
    copy_own(kBytesPerPoll);
    if (own_copied_ < own_bytes()) return false;
  }
  distance_ = 1;
  return true;
}

void StreamExchange::copy_out(size_t index, size_t offset, size_t bytes,
                              const std::byte* from) const {
  shm_group_->parallel().copy(static_cast<std::byte*>(sinks_[index].data) + offset, from, bytes,
                              footprint_);
}

PieceExchange::PieceExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                             size_t count, Sources outgoing, std::vector<Sinks> incoming)
    : StreamExchange(shm_group, signature, count,
                     std::vector<Source>(shm_group->size(), whole(outgoing)), wholes(incoming),
                     Cast::kMulti),
      pieces_(std::move(outgoing)),
      sinks_(std::move(incoming)) {}

void PieceExchange::copy_in(size_t, size_t offset, size_t bytes, std::byte* slot) const {
  copy_pieces_in(pieces_, offset, bytes, slot);
}

void PieceExchange::copy_out(size_t index, size_t offset, size_t bytes,
                             const std::byte* from) const {
  visit_pieces(sinks_[index], element(), offset, bytes,
               [&](const Sink& piece, size_t start, size_t n) {
                 shm_group_->parallel().copy(static_cast<std::byte*>(piece.data) + start, from, n,
                                             footprint());
                 from += n;
               });
}

ShmReduceScatter::ShmReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                                   size_t count, const std::vector<Source>& inputs, void* out,
                                   Combining how)
    : Streams(shm_group, signature, count, inputs,
              std::vector<size_t>(shm_group->size(), inputs[shm_group->self()].count), Cast::kUni),
      own_(inputs[shm_group->self()]),
      out_(static_cast<std::byte*>(out)),
      how_(how) {}

bool ShmReduceScatter::deliver(size_t round) {
  const size_t bytes = own_.count * element();
  bool in_slots = false;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    in_slots = in_slots || (i != shm_group_->self() && incoming(i).zero_copy == nullptr);
  }
  // The members' chunks are alike: they send the same numbers of elements to the same members.
  const size_t end = in_slots ? std::min((round + 1) * chunk(), bytes) : bytes;
  const size_t stop = std::min(end, reduced_ + kBytesPerPoll);
  auto& sources = shm_group_->sources();
  while (reduced_ < stop) {
    const std::span<const std::byte> mine = own(reduced_, stop - reduced_);
    for (size_t i = 0; i < shm_group_->size(); ++i) {
      if (i == shm_group_->self()) {
        sources[i] = mine.data();
      } else if (incoming(i).zero_copy != nullptr) {
        sources[i] = incoming(i).zero_copy + reduced_;
      } else {
        const size_t in_round = reduced_ - round * chunk();
        sources[i] = shm_group_->data(shm_group_->slot(i)) + incoming(i).offset + in_round;
      }
    }
    shm_group_->parallel().reduce(out_ + reduced_, sources.data(), sources.size(),
                                  mine.size() / element(), signature_.operands(), how_.op,
                                  how_.divisor);
    reduced_ += mine.size();
  }
  return reduced_ >= end;
}

std::span<const std::byte> ShmReduceScatter::own(size_t offset, size_t bytes) const {
  return {static_cast<const std::byte*>(own_.data) + offset, bytes};
}

PieceReduceScatter::PieceReduceScatter(std::shared_ptr<ShmGroup> shm_group,
                                       const Signature& signature, size_t count,
                                       std::vector<Sources> inputs, void* out, Combining how)
    : ShmReduceScatter(std::move(shm_group), signature, count, wholes(inputs), out, how),
      pieces_(std::move(inputs)) {}

void PieceReduceScatter::copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const {
  copy_pieces_in(pieces_[index], offset, bytes, slot);
}

std::span<const std::byte> PieceReduceScatter::own(size_t offset, size_t bytes) const {
  std::span<const std::byte> found;
  visit_pieces(pieces_[shm_group_->self()], element(), offset, bytes,
               [&](const Source& piece, size_t start, size_t length) {
                 if (!found.empty()) return;
                 found = {static_cast<const std::byte*>(piece.data) + start, length};
               });
  return found;
}

}  // namespace hbm::shm
