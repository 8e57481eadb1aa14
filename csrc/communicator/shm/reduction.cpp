#include "communicator/shm/reduction.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace hbm::node {
namespace {

constexpr size_t kFewMembers = 3;                // up to here everybody reduces all of a chunk
constexpr size_t kSliceBytes = size_t{4} << 20;  // after which a timeout or an abort is looked for

const std::byte* at(const void* data, size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}
std::byte* at(void* data, size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

// The work of a small reduction grows with the members, a large one's does not.
size_t small_bytes(const Team& team) {
  const size_t chunk = team.layout().chunk_bytes;
  return team.size() <= kFewMembers ? chunk : 2 * chunk / team.size();
}

}  // namespace

Reduction::Reduction(std::shared_ptr<Team> team, const Signature& signature,
                     const ReductionBuffers& buffers)
    : Step(std::move(team), signature, buffers.count),
      buffers_(buffers),
      chunk_(team_->layout().chunk_bytes / element()),
      chunks_((count_ + chunk_ - 1) / chunk_),
      small_(count_ * element() <= small_bytes(*team_)) {}

void Reduction::begin() {
  const size_t bytes = count_ * element();
  Slot& slot = open();
  slot.place = {count_, 0, Place::kSlots, 0};
  const bool in_place = !takes_result() || buffers_.in == buffers_.out;
  if (bytes >= kDirectBytes && in_place) {
    if (const auto offset = team_->offset_in_segment(buffers_.in, bytes)) {
      slot.place = {count_, *offset, Place::kDirect, 0};
      direct_ = true;
    }
  }
  if (small_ && !direct_) copy_bytes(team_->data(slot), buffers_.in, bytes);
  team_->publish();
}

Progress Reduction::step() {
  switch (way_) {
    case Way::kUndecided:
      return decide();
    case Way::kDirect:
      return direct();
    case Way::kClosing:
      return Progress::kDone;
    case Way::kWhole:
      return whole_chunk();
    case Way::kShares:
      return shares_of_chunk();
  }
  return Progress::kDone;
}

// The same on every member, because all see the same slots.
Progress Reduction::decide() {
  check(/*same_count=*/true);
  size_t direct = 0;
  for (size_t i = 0; i < team_->size(); ++i) {
    if (team_->slot(i).place.kind == Place::kDirect) ++direct;
  }
  if (direct == 0 && small_) return one_slot();
  if (direct == team_->size()) {
    prepare_direct();
    way_ = Way::kDirect;
    return Progress::kActive;
  }
  direct_ = false;
  way_ = team_->size() <= kFewMembers ? Way::kWhole : Way::kShares;
  post(0);
  return Progress::kActive;
}

Progress Reduction::one_slot() {
  if (takes_result()) {
    auto& sources = team_->sources();
    for (size_t i = 0; i < team_->size(); ++i) sources[i] = team_->data(team_->slot(i));
    reduce(buffers_.out, sources.data(), sources.size(), count_, signature_.dtype,
           signature_.reduce_op, buffers_.divisor);
  }
  return Progress::kDone;
}

// Points at this rank's share of every member's buffer.
void Reduction::prepare_direct() {
  const size_t first = share(count_, team_->self()).offset * element();
  sink_count_ = 0;
  for (size_t i = 0; i < team_->size(); ++i) {
    std::byte* there = team_->direct(i, team_->slot(i).place, count_ * element()) + first;
    team_->sources()[i] = there;
    const bool wanted = buffers_.root < 0 || static_cast<size_t>(buffers_.root) == i;
    if (wanted) team_->sinks()[sink_count_++] = there;
  }
}

// A slice of the share, stored for everybody who takes the result.
Progress Reduction::direct() {
  if (team_->failed()) team_->require_alive({}, *this, [] { return false; });
  auto& sources = team_->sources();
  auto& sinks = team_->sinks();
  const size_t left = share(count_, team_->self()).count - next_;
  const size_t slice = std::min(left, kSliceBytes / element());
  if (slice > 0) {
    reduce_to(sinks.data(), sink_count_, sources.data(), sources.size(), slice, signature_.dtype,
              signature_.reduce_op, buffers_.divisor);
  }
  next_ += slice;
  if (slice < left) {
    for (const void*& source : sources) source = at(source, slice * element());
    for (void*& sink : sinks) sink = at(sink, slice * element());
    return Progress::kActive;
  }
  open();
  team_->publish();
  way_ = Way::kClosing;
  return Progress::kActive;
}

Progress Reduction::whole_chunk() {
  const Range range = chunk(next_);
  if (takes_result()) {
    auto& sources = team_->sources();
    for (size_t i = 0; i < team_->size(); ++i) sources[i] = team_->data(team_->slot(i));
    sources[team_->self()] = at(buffers_.in, range.offset * element());
    reduce(at(buffers_.out, range.offset * element()), sources.data(), sources.size(), range.count,
           signature_.dtype, signature_.reduce_op, buffers_.divisor);
  }
  if (++next_ == chunks_) return Progress::kDone;
  post(next_);
  return Progress::kActive;
}

// Tick j shows the members' chunk j and their shares of the result of chunk j - 1.
Progress Reduction::shares_of_chunk() {
  if (next_ > 0) collect(next_ - 1);
  if (next_ == chunks_) return Progress::kDone;
  reduce_shares(next_);
  post(++next_);
  return Progress::kActive;
}

void Reduction::post(size_t index) {
  Slot& slot = open();
  if (index < chunks_) {
    const Range range = chunk(index);
    copy_bytes(team_->data(slot), at(buffers_.in, range.offset * element()),
               range.count * element());
  }
  team_->publish();
}

void Reduction::reduce_shares(size_t index) {
  const Range mine = share(chunk(index).count, team_->self());
  auto& sources = team_->sources();
  for (size_t i = 0; i < team_->size(); ++i) {
    sources[i] = team_->data(team_->slot(i)) + mine.offset * element();
  }
  reduce(team_->data(team_->next_slot()) + team_->layout().chunk_bytes, sources.data(),
         sources.size(), mine.count, signature_.dtype, signature_.reduce_op, buffers_.divisor);
}

void Reduction::collect(size_t index) {
  if (!takes_result()) return;
  const Range range = chunk(index);
  for (size_t i = 0; i < team_->size(); ++i) {
    const Range theirs = share(range.count, i);
    copy_bytes(at(buffers_.out, (range.offset + theirs.offset) * element()),
               team_->data(team_->slot(i)) + team_->layout().chunk_bytes, theirs.count * element());
  }
}

Reduction::Range Reduction::chunk(size_t index) const {
  const size_t offset = index * chunk_;
  return {offset, std::min(chunk_, count_ - offset)};
}

// Shares end at cache lines, so that no two members write to the same one.
Reduction::Range Reduction::share(size_t count, size_t member) const {
  const size_t line = kCacheLine / element();
  const size_t each = ((count + team_->size() - 1) / team_->size() + line - 1) / line * line;
  const size_t offset = std::min(member * each, count);
  return {offset, std::min(each, count - offset)};
}

bool Reduction::takes_result() const {
  return buffers_.root < 0 || static_cast<size_t>(buffers_.root) == team_->self();
}

}  // namespace hbm::node
