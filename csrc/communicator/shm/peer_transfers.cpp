#include "communicator/shm/peer_transfers.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "communicator/shm/tuning.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "kernels/tuning.h"

namespace hbm::communicator::shm {
namespace {

// Returns the quotient, rounded up.
size_t divided(size_t dividend, size_t divisor) { return (dividend + divisor - 1) / divisor; }

std::vector<size_t> counts(const std::vector<Sink>& sinks) {
  std::vector<size_t> found;
  for (const Sink& sink : sinks) found.push_back(sink.count);
  return found;
}

// Returns one Source or Sink for a list. For a list of one entry it is the entry; for another list
// it has the count of all entries and no address.
template <class Entry>
Entry whole(const std::vector<Entry>& entries) {
  return entries.size() == 1 ? entries.front() : Entry{nullptr, count_of(entries)};
}

template <class Entry>
std::vector<Entry> wholes(const std::vector<std::vector<Entry>>& transfers) {
  std::vector<Entry> found;
  for (const auto& entries : transfers) found.push_back(whole(entries));
  return found;
}

}  // namespace

PeerTransfers::PeerTransfers(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                             size_t count, std::vector<Source> outgoing,
                             const std::vector<size_t>& incoming, Cast cast)
    : PhasedOperation(std::move(shm_group), signature, count),
      outgoing_(std::move(outgoing)),
      multicast_(cast == Cast::kMulti),
      incoming_(incoming.size()) {
  for (size_t i = 0; i < incoming.size(); ++i) incoming_[i].count = incoming[i];
}

void PeerTransfers::begin() {
  Slot& slot = open();
  announce(slot);
  show_destinations(slot);
  fill(slot, 0);
  shm_group_->publish();
}

// Chooses how the data of each transfer moves, and publishes the choices in `slot`.
void PeerTransfers::announce(Slot& slot) {
  size_t transfers = 0;
  size_t largest = 0;  // elements
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    const size_t count = outgoing_[i].count;
    // Counts this rank's own part too in a reduce_scatter, so that the number is the same on all
    // ranks.
    const bool has_room = i != shm_group_->self() || chunks_are_alike();
    if (count > 0 && has_room) ++transfers;
    largest = std::max(largest, count);
  }
  if (multicast_) transfers = std::min<size_t>(transfers, 1);
  const size_t room = shm_group_->layout().data_bytes / std::max<size_t>(transfers, 1);
  chunk_ = chunk_of(largest * element(), room / kCacheLine * kCacheLine);
  slot.chunk = chunk_;
  slot.balance = 0;

  TransferLocation* locations = shm_group_->locations(slot);
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    const Source& source = outgoing_[i];
    const size_t bytes = source.count * element();
    locations[i] = {source.count, 0, TransferLocation::kSlots, 0};
    if (i == shm_group_->self()) continue;
    slot.balance += shm_group_->key_to(i) * source.count;
    slot.balance -= shm_group_->key_from(i) * incoming_[i].count;
    if (bytes == 0) continue;
    const auto offset =
        bytes >= kZeroCopyBytes ? shm_group_->offset_in_segment(source.data, bytes) : std::nullopt;
    if (offset) {
      locations[i] = {source.count, *offset, TransferLocation::kZeroCopy, 0};
      slot.zero_copy = 1;
      observed_.zero_copy = true;
      continue;
    }
    observed_.staged = true;
    if (slot_transfers_.empty() || !multicast_)
      slot_transfers_.push_back({i, slot_transfers_.size() * chunk_});
    locations[i].offset = slot_transfers_.back().offset;
    slot.rounds = std::max<uint64_t>(slot.rounds, divided(bytes, chunk_));
  }
}

// Returns the chunk, that is, the bytes of each transfer in one slot. `bytes`: the size of the
// largest transfer. `room`: the most bytes for each transfer in a slot. A transfer that is no
// longer than the chunk of a reduction is cut only if it is longer than `room`. For a longer
// transfer the chunk is at most half of the transfer. So the receiver copies the first chunk while
// this rank copies the second. If the tensors do not fit into the cache, the chunk is at most the
// chunk of a reduction, so that the slots take little of the cache. (A threshold that follows the
// cache size made no difference.)
size_t PeerTransfers::chunk_of(size_t bytes, size_t room) const {
  const size_t least = std::min(shm_group_->layout().chunk_bytes, room);
  if (chunks_are_alike()) return least;  // ranks may have different `bytes` by mistake
  const bool large = sides() * shm_group_->size() * bytes >= kernels::kNonTemporalFromAtMostBytes;
  const size_t most = large ? least : std::clamp(divided(bytes, 2), least, room);
  const size_t rounds = std::max<size_t>(divided(bytes, most), 1);
  return std::max<size_t>(divided(divided(bytes, rounds), kCacheLine), 1) * kCacheLine;
}

void PeerTransfers::show_destinations(Slot& slot) {
  TransferLocation* locations = shm_group_->locations(slot);
  for (size_t i = 0; i < incoming_.size(); ++i) {
    const size_t bytes = incoming_[i].count * element();
    if (i == shm_group_->self() || bytes < kZeroCopyBytes || outgoing_[i].count > 0) continue;
    const std::byte* const location = destination(i);
    const auto offset = shm_group_->offset_in_segment(location, bytes);
    if (!offset) continue;
    locations[i] = {incoming_[i].count, *offset, TransferLocation::kDestination, 0};
    shows_destination_ = true;
  }
}

void PeerTransfers::fill(Slot& slot, size_t round) const {
  for (const SlotTransfer& transfer : slot_transfers_) {
    const size_t bytes = outgoing_[transfer.to].count * element();
    const size_t done = round * chunk_;
    if (done >= bytes) continue;
    copy_in(transfer.to, done, std::min(chunk_, bytes - done),
            shm_group_->data(slot) + transfer.offset);
  }
}

void PeerTransfers::copy_in(size_t index, size_t offset, size_t bytes, std::byte* slot) const {
  shm_group_->copy_to_peers()(slot, static_cast<const std::byte*>(outgoing_[index].data) + offset,
                              bytes);
}

void PeerTransfers::copy_entries_in(const Sources& entries, size_t offset, size_t bytes,
                                    std::byte* slot) const {
  visit_entries(
      entries, element(), offset, bytes, [&](const Source& entry, size_t start, size_t n) {
        shm_group_->copy_to_peers()(slot, static_cast<const std::byte*>(entry.data) + start, n);
        slot += n;
      });
}

// Reads how each rank sends: zero-copy or by chunks, and in how many rounds.
void PeerTransfers::learn() {
  check(/*same_count=*/false);
  uint64_t balance = 0;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    balance += shm_group_->slot(i).balance;
    if (i != shm_group_->self()) learn_from(i);
    rounds_ = std::max<size_t>(rounds_, shm_group_->slot(i).rounds);
    needs_completion_barrier_ = needs_completion_barrier_ || shm_group_->slot(i).zero_copy != 0;
  }
  unbalanced_ = balance != 0;
  learned_ = true;
}

void PeerTransfers::learn_from(size_t index) {
  const Slot& slot = shm_group_->slot(index);
  const TransferLocation& location = shm_group_->locations(slot)[shm_group_->self()];
  const Slot& own_slot = shm_group_->slot(shm_group_->self());
  const TransferLocation& own = shm_group_->locations(own_slot)[index];
  Incoming& incoming = incoming_[index];
  const bool destination = location.kind == TransferLocation::kDestination;
  check_transfer(index, destination ? 0 : location.count, incoming.count);
  check_location(index);
  if (destination && own.kind == TransferLocation::kZeroCopy) {
    check_transfer(index, location.count, own.count);
    destination_ = {shm_group_->address_in_segment(index, location.offset, own.count * element()),
                    own.count};
    destination_bytes_ = own.count * element() * shm_group_->size();
    next_ = static_cast<const std::byte*>(outgoing_[index].data);
  }
  incoming.put_by_sender =
      own.kind == TransferLocation::kDestination && location.kind == TransferLocation::kZeroCopy;
  incoming.offset = location.offset;
  incoming.chunk = slot.chunk;
  if (location.kind == TransferLocation::kZeroCopy) {
    incoming.zero_copy =
        shm_group_->address_in_segment(index, location.offset, location.count * element());
    observed_.zero_copy = true;
  } else if (incoming.count > 0) {
    observed_.staged = true;
  }
}

// Throws Error(kMismatch) unless the announcement of local rank `index` is consistent. No later
// code checks it.
void PeerTransfers::check_location(size_t index) const {
  const Slot& slot = shm_group_->slot(index);
  const TransferLocation& location = shm_group_->locations(slot)[shm_group_->self()];
  const size_t room = shm_group_->layout().data_bytes;
  const uint64_t bytes = location.count * element();  // bytes that this rank expects
  const auto in_slots = [&] {
    return location.kind == TransferLocation::kSlots && location.offset <= room &&
           std::min(slot.chunk, bytes) <= room - location.offset &&
           slot.rounds >= divided(bytes, slot.chunk);
  };
  const bool chunk =
      slot.chunk > 0 && slot.chunk <= room && (!chunks_are_alike() || slot.chunk == chunk_);
  const bool zero_copy = location.kind == TransferLocation::kZeroCopy && slot.zero_copy != 0;
  const bool destination =
      location.kind == TransferLocation::kDestination && signature_.op == OpCode::kGather;
  if (chunk && (zero_copy || destination || in_slots()) && slot.rounds <= most_rounds(index))
    return;
  throw Error(ErrorKind::kMismatch,
              shm_group_->local_rank(index).name + " of " + shm_group_->group() +
                  " names a transfer of " + std::to_string(bytes) + " bytes at " +
                  std::to_string(location.offset) + " of its slots, which have " +
                  std::to_string(room) + ", in " + std::to_string(slot.rounds) + " rounds of " +
                  std::to_string(slot.chunk) + ", for " + describe() +
                  "; a stray store may have spoiled its shared memory");
}

// Returns the most rounds that the transfers of local rank `index` can need, by its
// TransferLocations; at least 1. REQUIRES: that rank's chunk is not 0.
uint64_t PeerTransfers::most_rounds(size_t index) const {
  const Slot& slot = shm_group_->slot(index);
  const TransferLocation* const locations = shm_group_->locations(slot);
  uint64_t most = 1;
  if (slot.rounds <= most)
    return most;  // the usual case, without fetching the other TransferLocations
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (i == index || locations[i].kind != TransferLocation::kSlots) continue;
    most = std::max(most, divided(locations[i].count * element(), slot.chunk));
  }
  return most;
}

progress::Progress PeerTransfers::next_phase() {
  if (!learned_) learn();
  if (unbalanced_) {
    shm_group_->require_no_report();
    return progress::Progress::kIdle;
  }
  if (!put() || (round_ < rounds_ && !deliver(round_))) {
    shm_group_->require_no_report();
    return progress::Progress::kActive;
  }
  ++round_;
  if (round_ < rounds_) {
    Slot& slot = open();
    fill(slot, round_);
    shm_group_->publish();
    return progress::Progress::kActive;
  }
  if (!needs_completion_barrier_) return progress::Progress::kDone;
  needs_completion_barrier_ = false;
  open();
  shm_group_->publish();
  return progress::Progress::kActive;
}

// Copies up to kBytesPerPoll of this rank's transfer to the destination in the root's segment.
// Returns true if nothing is left to copy.
bool PeerTransfers::put() {
  const size_t left = destination_.count * element();
  if (left == 0) return true;
  const size_t slice = std::min(left, kBytesPerPoll);
  shm_group_->parallel().copy(destination_.data, next_, slice, destination_bytes_);
  destination_ = {static_cast<std::byte*>(destination_.data) + slice,
                  destination_.count - slice / element()};
  next_ += slice;
  return slice == left;
}

PeerTransfers::Part PeerTransfers::part(size_t index, size_t round) const {
  const Incoming& transfer = incoming_[index];
  const size_t bytes = transfer.count * element();
  if (transfer.put_by_sender) return {nullptr, 0, 0};
  if (transfer.zero_copy != nullptr) return {transfer.zero_copy, 0, round == 0 ? bytes : 0};
  const size_t offset = round * transfer.chunk;
  if (offset >= bytes) return {nullptr, 0, 0};
  return {shm_group_->data(shm_group_->slot(index)) + transfer.offset, offset,
          std::min<size_t>(transfer.chunk, bytes - offset)};
}

// An alltoall is never self-sufficient: transfers between other ranks may be larger than this
// rank's transfers, and all ranks go through the rounds of the largest transfer.
bool PeerTransfers::self_sufficient() const {
  if (signature_.op == OpCode::kAlltoall) return false;
  const size_t room = shm_group_->layout().chunk_bytes / shm_group_->size();
  const size_t most = std::min(room, kZeroCopyBytes - 1) / element();
  return std::all_of(outgoing_.begin(), outgoing_.end(),
                     [&](const Source& source) { return source.count <= most; }) &&
         std::all_of(incoming_.begin(), incoming_.end(),
                     [&](const Incoming& transfer) { return transfer.count <= most; });
}

PeerExchange::PeerExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                           size_t count, std::vector<Source> outgoing, std::vector<Sink> incoming,
                           Cast cast)
    : PeerTransfers(shm_group, signature, count, outgoing, counts(incoming), cast),
      own_source_(outgoing[shm_group->self()]),
      sinks_(std::move(incoming)) {
  for (const Sink& sink : sinks_) footprint_ += sides() * sink.count * element();
}

void PeerExchange::begin() {
  PeerTransfers::begin();
  if (own_bytes() < kOverlappedOwnCopyBytes) copy_own(own_bytes());
}

bool PeerExchange::meanwhile() {
  if (own_copied_ == own_bytes()) return false;
  copy_own(kOwnCopySliceBytes);
  return true;
}

size_t PeerExchange::own_bytes() const {
  const Sink& own = sinks_[shm_group_->self()];
  return own.data == own_source_.data ? 0 : own.count * element();
}

void PeerExchange::copy_own(size_t most) {
  const size_t bytes = std::min(most, own_bytes() - own_copied_);
  if (bytes == 0) return;
  shm_group_->parallel().copy(
      static_cast<std::byte*>(sinks_[shm_group_->self()].data) + own_copied_,
      static_cast<const std::byte*>(own_source_.data) + own_copied_, bytes, footprint_);
  own_copied_ += bytes;
}

std::byte* PeerExchange::destination(size_t index) const {
  if (signature_.op != OpCode::kGather) return nullptr;
  return static_cast<std::byte*>(sinks_[index].data);
}

bool PeerExchange::deliver(size_t round) {
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

void PeerExchange::copy_out(size_t index, size_t offset, size_t bytes,
                            const std::byte* from) const {
  shm_group_->parallel().copy(static_cast<std::byte*>(sinks_[index].data) + offset, from, bytes,
                              footprint_);
}

ScatterGatherExchange::ScatterGatherExchange(std::shared_ptr<ShmGroup> shm_group,
                                             const Signature& signature, size_t count,
                                             Sources outgoing, std::vector<Sinks> incoming)
    : PeerExchange(shm_group, signature, count,
                   std::vector<Source>(shm_group->size(), whole(outgoing)), wholes(incoming),
                   Cast::kMulti),
      entries_(std::move(outgoing)),
      sinks_(std::move(incoming)) {}

void ScatterGatherExchange::copy_in(size_t, size_t offset, size_t bytes, std::byte* slot) const {
  copy_entries_in(entries_, offset, bytes, slot);
}

void ScatterGatherExchange::copy_out(size_t index, size_t offset, size_t bytes,
                                     const std::byte* from) const {
  visit_entries(sinks_[index], element(), offset, bytes,
                [&](const Sink& entry, size_t start, size_t n) {
                  shm_group_->parallel().copy(static_cast<std::byte*>(entry.data) + start, from, n,
                                              footprint());
                  from += n;
                });
}

ShmReduceScatter::ShmReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                                   size_t count, const std::vector<Source>& inputs, void* out,
                                   Combining how)
    : PeerTransfers(shm_group, signature, count, inputs,
                    std::vector<size_t>(shm_group->size(), inputs[shm_group->self()].count),
                    Cast::kUni),
      own_(inputs[shm_group->self()]),
      out_(static_cast<std::byte*>(out)),
      how_(how) {}

bool ShmReduceScatter::deliver(size_t round) {
  const size_t bytes = own_.count * element();
  bool in_slots = false;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    in_slots = in_slots || (i != shm_group_->self() && incoming(i).zero_copy == nullptr);
  }
  // All ranks use equal chunks, because all have the same count for a given receiver.
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

ScatterGatherReduceScatter::ScatterGatherReduceScatter(std::shared_ptr<ShmGroup> shm_group,
                                                       const Signature& signature, size_t count,
                                                       std::vector<Sources> inputs, void* out,
                                                       Combining how)
    : ShmReduceScatter(std::move(shm_group), signature, count, wholes(inputs), out, how),
      entries_(std::move(inputs)) {}

void ScatterGatherReduceScatter::copy_in(size_t index, size_t offset, size_t bytes,
                                         std::byte* slot) const {
  copy_entries_in(entries_[index], offset, bytes, slot);
}

std::span<const std::byte> ScatterGatherReduceScatter::own(size_t offset, size_t bytes) const {
  std::span<const std::byte> found;
  visit_entries(entries_[shm_group_->self()], element(), offset, bytes,
                [&](const Source& entry, size_t start, size_t length) {
                  if (!found.empty()) return;
                  found = {static_cast<const std::byte*>(entry.data) + start, length};
                });
  return found;
}

}  // namespace hbm::communicator::shm
