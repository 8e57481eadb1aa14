// allreduce and reduce within a node. All algorithms reduce an element in the order of local ranks,
// so all give the same bits. They differ in the ranks that reduce and write each element:
//
// - zero-copy, for tensors of kZeroCopyReductionBytes or more, if all buffers are in place and in
//   segments. Each rank reduces a share of the elements in place, and writes the result to the
//   buffer of every rank that takes the result;
// - one shot, for tensors of at most one_shot_bytes(): every rank publishes its data in the first
//   phase. Every rank that takes the result reduces the data of all ranks into its own buffer;
// - whole chunks, for other tensors of few ranks: as one shot, chunk by chunk through the slots;
// - shares, for other tensors of many ranks: each rank reduces a share of each chunk into its slot.
//   Every rank that takes the result copies all shares to its buffer.
//
// Threads: one thread at a time, as for Operation.
#pragma once

#include <cstddef>
#include <memory>

#include "communicator/communicator.h"
#include "communicator/shm/phased_operation.h"

namespace hbm::communicator::shm {

struct ReductionBuffers {
  const void* in;
  void* out;  // used on ranks that take the result
  size_t count;
  int root;        // local rank that takes the result; -1: all ranks take it
  size_t divisor;  // AVG: the ranks of the whole group
};

// Returns the share of `count` elements that local rank `index` of `local_size` reduces. Shares
// have the length of whole cache lines, so that in an aligned buffer no two ranks write to one
// line. The last shares may be shorter, or empty.
ElementRange share_of(size_t count, size_t element, size_t local_size, size_t index);

class ShmReduction final : public PhasedOperation {
 public:
  ShmReduction(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
               const ReductionBuffers& buffers);

  void begin() override;
  bool peers_may_write() const override { return zero_copy_; }
  bool self_sufficient() const override {
    return one_shot_ && count_ * element() < kZeroCopyReductionBytes;
  }

 private:
  enum class Algorithm { kUndecided, kZeroCopy, kCompletionBarrier, kWholeChunks, kShares };

  progress::Progress next_phase() override;
  progress::Progress decide();
  progress::Progress one_shot();
  void prepare_zero_copy();
  progress::Progress zero_copy();
  progress::Progress whole_chunk();
  progress::Progress shares_of_chunk();
  void post(size_t chunk);
  void show_chunk(Slot& slot, size_t chunk);
  bool fits_inline() const { return count_ * element() <= kSlotInlineBytes; }
  void reduce_shares(size_t chunk);
  // Reduces the elements `range` of the tensor into `out`. The other ranks show them in their
  // slots, from element `shown` on.
  void reduce_shown(void* out, ElementRange range, size_t shown);
  void collect(size_t chunk);

  ElementRange chunk(size_t index) const;
  ElementRange share(size_t count, size_t index) const {
    return share_of(count, element(), shm_group_->size(), index);
  }
  bool takes_result() const;

  const ReductionBuffers buffers_;
  const bool one_shot_;  // the tensor is one chunk, of at most one_shot_bytes()
  const size_t chunk_;   // elements
  const size_t chunks_;
  bool zero_copy_ = false;  // other ranks may read and write this rank's buffer
  Algorithm algorithm_ = Algorithm::kUndecided;
  size_t sink_count_ = 0;  // kZeroCopy: ranks that take the result
  // kWholeChunks, kShares: the next chunk. kZeroCopy: the elements of this rank's share that are
  // done.
  size_t next_ = 0;
};

}  // namespace hbm::communicator::shm
