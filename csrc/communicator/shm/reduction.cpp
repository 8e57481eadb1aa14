#include "communicator/shm/reduction.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "communicator/shm/tuning.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace hbm::communicator::shm {
namespace {

const std::byte* at(const void* data, size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}
std::byte* at(void* data, size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

// Returns the most bytes of a one-shot reduction. In one shot each rank's work grows with the
// number of ranks. So more than kWholeChunkRanks ranks reduce larger tensors in shares, with which
// the work of a rank does not grow.
size_t one_shot_bytes(const ShmGroup& shm_group) {
  const size_t chunk = shm_group.layout().chunk_bytes;
  if (shm_group.size() <= kWholeChunkRanks) return chunk;
  return std::max(std::min(2 * chunk, kOneShotTotalBytes) / shm_group.size(), kSlotInlineBytes);
}

}  // namespace

ElementRange share_of(size_t count, size_t element, size_t local_size, size_t index) {
  const size_t line = kCacheLine / element;
  const size_t each = ((count + local_size - 1) / local_size + line - 1) / line * line;
  const size_t offset = std::min(index * each, count);
  return {offset, std::min(each, count - offset)};
}

ShmReduction::ShmReduction(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                           const ReductionBuffers& buffers)
    : PhasedOperation(std::move(shm_group), signature, buffers.count),
      buffers_(buffers),
      one_shot_(count_ * element() <= one_shot_bytes(*shm_group_)),
      chunk_(one_shot_ ? count_ : shm_group_->layout().chunk_bytes / element()),
      chunks_(one_shot_ ? 1 : (count_ + chunk_ - 1) / chunk_) {}

void ShmReduction::begin() {
  const size_t bytes = count_ * element();
  Slot& slot = open();
  slot.location = {count_, 0, TransferLocation::kSlots, 0};
  const bool in_place = !takes_result() || buffers_.in == buffers_.out;
  if (bytes >= kZeroCopyReductionBytes && in_place) {
    if (const auto offset = shm_group_->offset_in_segment(buffers_.in, bytes)) {
      slot.location = {count_, *offset, TransferLocation::kZeroCopy, 0};
      zero_copy_ = true;
    }
  }
  if (!zero_copy_) show_chunk(slot, 0);
  shm_group_->publish();
}

progress::Progress ShmReduction::next_phase() {
  switch (algorithm_) {
    case Algorithm::kUndecided:
      return decide();
    case Algorithm::kZeroCopy:
      return zero_copy();
    case Algorithm::kCompletionBarrier:
      return progress::Progress::kDone;
    case Algorithm::kWholeChunks:
      return whole_chunk();
    case Algorithm::kShares:
      return shares_of_chunk();
  }
  return progress::Progress::kDone;
}

// Chooses the algorithm. The choice is the same on every rank, because all read the same slots.
progress::Progress ShmReduction::decide() {
  check(/*same_count=*/true);
  if (count_ * element() < kZeroCopyReductionBytes && one_shot_) return one_shot();
  size_t zero_copy = 0;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (shm_group_->slot(i).location.kind == TransferLocation::kZeroCopy) ++zero_copy;
  }
  if (zero_copy == 0 && one_shot_) return one_shot();
  if (zero_copy == shm_group_->size()) {
    prepare_zero_copy();
    observed_.zero_copy = true;
    algorithm_ = Algorithm::kZeroCopy;
    return progress::Progress::kActive;
  }
  zero_copy_ = false;
  observed_.staged = true;
  algorithm_ =
      shm_group_->size() <= kWholeChunkRanks ? Algorithm::kWholeChunks : Algorithm::kShares;
  if (zero_copy == 0) return next_phase();  // all ranks have published their first chunk
  post(0);
  return progress::Progress::kActive;
}

progress::Progress ShmReduction::one_shot() {
  observed_.staged = count_ > 0;
  if (takes_result()) reduce_shown(buffers_.out, {0, count_}, 0);
  return progress::Progress::kDone;
}

// Sets the pointers to this rank's share of every buffer.
void ShmReduction::prepare_zero_copy() {
  const size_t first = share(count_, shm_group_->self()).offset * element();
  sink_count_ = 0;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    const uint64_t offset = shm_group_->slot(i).location.offset;
    std::byte* there = shm_group_->address_in_segment(i, offset, count_ * element()) + first;
    shm_group_->sources()[i] = there;
    const bool wanted = buffers_.root < 0 || static_cast<size_t>(buffers_.root) == i;
    if (wanted) shm_group_->sinks()[sink_count_++] = there;
  }
}

// Reduces a slice of the share, and stores it for every rank that takes the result.
progress::Progress ShmReduction::zero_copy() {
  shm_group_->require_no_report();
  auto& sources = shm_group_->sources();
  auto& sinks = shm_group_->sinks();
  const size_t left = share(count_, shm_group_->self()).count - next_;
  const size_t slice =
      std::min(left, kReducedBytesPerPoll * shm_group_->parallel().threads() / element());
  if (slice > 0) {
    shm_group_->parallel().reduce_to(sinks.data(), sink_count_, sources.data(), sources.size(),
                                     slice, signature_.dtype, signature_.reduce_op,
                                     buffers_.divisor);
  }
  next_ += slice;
  if (slice < left) {
    for (const void*& source : sources) source = at(source, slice * element());
    for (void*& sink : sinks) sink = at(sink, slice * element());
    return progress::Progress::kActive;
  }
  open();
  shm_group_->publish();
  algorithm_ = Algorithm::kCompletionBarrier;
  return progress::Progress::kActive;
}

progress::Progress ShmReduction::whole_chunk() {
  const ElementRange range = chunk(next_);
  if (takes_result()) reduce_shown(at(buffers_.out, range.offset * element()), range, 0);
  if (++next_ == chunks_) return progress::Progress::kDone;
  post(next_);
  return progress::Progress::kActive;
}

// Phase j publishes chunk j of each rank, and the shares of the result of chunk j - 1.
progress::Progress ShmReduction::shares_of_chunk() {
  if (next_ > 0) collect(next_ - 1);
  if (next_ == chunks_) return progress::Progress::kDone;
  reduce_shares(next_);
  post(++next_);
  return progress::Progress::kActive;
}

void ShmReduction::post(size_t index) {
  Slot& slot = open();
  if (index < chunks_) show_chunk(slot, index);
  shm_group_->publish();
}

void ShmReduction::show_chunk(Slot& slot, size_t index) {
  const ElementRange range = chunk(index);
  std::byte* const there = fits_inline() ? slot.inline_data.data() : shm_group_->data(slot);
  shm_group_->copy_to_peers()(there, at(buffers_.in, range.offset * element()),
                              range.count * element());
}

void ShmReduction::reduce_shares(size_t index) {
  const ElementRange range = chunk(index);
  const ElementRange mine = share(range.count, shm_group_->self());
  reduce_shown(shm_group_->data(shm_group_->next_slot()) + shm_group_->layout().chunk_bytes,
               {range.offset + mine.offset, mine.count}, mine.offset);
}

// This rank's part comes from its tensor. Its slot has the same data, but the cache lines of the
// slot are in the caches of the ranks that read it.
void ShmReduction::reduce_shown(void* out, ElementRange range, size_t shown) {
  auto& sources = shm_group_->sources();
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    const Slot& slot = shm_group_->slot(i);
    const std::byte* const there = fits_inline() ? slot.inline_data.data() : shm_group_->data(slot);
    sources[i] = there + shown * element();
  }
  sources[shm_group_->self()] = at(buffers_.in, range.offset * element());
  kernels::reduce(out, sources.data(), sources.size(), range.count, signature_.dtype,
                  signature_.reduce_op, buffers_.divisor);
}

void ShmReduction::collect(size_t index) {
  if (!takes_result()) return;
  const ElementRange range = chunk(index);
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    const ElementRange theirs = share(range.count, i);
    kernels::copy_bytes(at(buffers_.out, (range.offset + theirs.offset) * element()),
                        shm_group_->data(shm_group_->slot(i)) + shm_group_->layout().chunk_bytes,
                        theirs.count * element());
  }
}

ElementRange ShmReduction::chunk(size_t index) const {
  const size_t offset = index * chunk_;
  return {offset, std::min(chunk_, count_ - offset)};
}

bool ShmReduction::takes_result() const {
  return buffers_.root < 0 || static_cast<size_t>(buffers_.root) == shm_group_->self();
}

}  // namespace hbm::communicator::shm
