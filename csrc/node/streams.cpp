#include "node/streams.h"

#include <algorithm>
#include <utility>

#include "reduce/copy.h"

namespace hbm::node {

Streams::Streams(std::shared_ptr<Team> team, const Signature& signature, size_t count,
                 std::vector<Source> outgoing, const std::vector<size_t>& incoming, Cast cast)
    : Step(std::move(team), signature, count),
      outgoing_(std::move(outgoing)),
      multicast_(cast == Cast::kMulti),
      incoming_(incoming.size()) {
  for (size_t i = 0; i < incoming.size(); ++i) incoming_[i].count = incoming[i];
}

void Streams::begin() {
  Slot& slot = open();
  announce(slot);
  fill(slot, 0);
  team_->publish();
}

// Chooses the way of each stream.
void Streams::announce(Slot& slot) {
  size_t streams = 0;  // equal on all ranks of a reduce_scatter, whose chunks must be alike
  for (const Source& source : outgoing_) streams += source.count > 0 ? 1 : 0;
  if (multicast_) streams = std::min<size_t>(streams, 1);
  const AreaLayout& layout = team_->layout();
  const size_t room = layout.data_bytes / std::max<size_t>(streams, 1);
  chunk_ = std::min(layout.chunk_bytes, room / kCacheLine * kCacheLine);
  slot.chunk = chunk_;

  Place* places = team_->places(slot);
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    const Source& source = outgoing_[i];
    const size_t bytes = source.count * element();
    places[i] = {source.count, 0, Place::kSlots, 0};
    if (i == team_->self() || bytes == 0) continue;
    const auto offset =
        bytes >= kDirectBytes ? team_->offset_in_segment(source.data, bytes) : std::nullopt;
    if (offset) {
      places[i] = {source.count, *offset, Place::kDirect, 0};
      slot.direct = 1;
      continue;
    }
    if (lanes_.empty() || !multicast_) lanes_.push_back({source, lanes_.size() * chunk_});
    places[i].offset = lanes_.back().offset;
    slot.rounds = std::max<uint64_t>(slot.rounds, (bytes + chunk_ - 1) / chunk_);
  }
}

void Streams::fill(Slot& slot, size_t round) const {
  for (const Lane& lane : lanes_) {
    const size_t bytes = lane.source.count * element();
    const size_t done = round * chunk_;
    if (done >= bytes) continue;
    copy_bytes(team_->data(slot) + lane.offset,
               static_cast<const std::byte*>(lane.source.data) + done,
               std::min(chunk_, bytes - done));
  }
}

// What the others chose.
void Streams::learn() {
  check(/*same_count=*/false);
  for (size_t i = 0; i < team_->size(); ++i) {
    const Slot& slot = team_->slot(i);
    rounds_ = std::max<size_t>(rounds_, slot.rounds);
    closing_ = closing_ || slot.direct != 0;
    if (i == team_->self()) continue;
    const Place& place = team_->places(slot)[team_->self()];
    Incoming& incoming = incoming_[i];
    check_stream(i, place.count, incoming.count);
    incoming.offset = place.offset;
    incoming.chunk = slot.chunk;
    if (place.kind == Place::kDirect) {
      incoming.direct = team_->direct(i, place, place.count * element());
    }
  }
}

Progress Streams::step() {
  if (round_ == 0) learn();
  if (round_ < rounds_) deliver(round_);
  ++round_;
  if (round_ < rounds_) {
    Slot& slot = open();
    fill(slot, round_);
    team_->publish();
    return Progress::kActive;
  }
  if (!closing_) return Progress::kDone;
  closing_ = false;
  open();
  team_->publish();
  return Progress::kActive;
}

Streams::Part Streams::part(size_t index, size_t round) const {
  const Incoming& stream = incoming_[index];
  const size_t bytes = stream.count * element();
  if (stream.direct != nullptr) return {round == 0 ? stream.direct : nullptr, 0, bytes};
  const size_t offset = round * stream.chunk;
  if (offset >= bytes) return {nullptr, 0, 0};
  return {team_->data(team_->slot(index)) + stream.offset, offset,
          std::min<size_t>(stream.chunk, bytes - offset)};
}

bool Streams::self_sufficient() const {
  const size_t room = team_->layout().chunk_bytes / team_->size();
  const size_t most = std::min(room, kDirectBytes - 1) / element();
  return std::all_of(outgoing_.begin(), outgoing_.end(),
                     [&](const Source& source) { return source.count <= most; }) &&
         std::all_of(incoming_.begin(), incoming_.end(),
                     [&](const Incoming& stream) { return stream.count <= most; });
}

}  // namespace hbm::node
