// allreduce and reduce within a node. Either way an element is reduced in the order of the members,
// so all give the same bits. The ways differ in who reduces what, and who writes the result:
//
// - zero-copy, from kZeroCopyBytes on, with all buffers in place and in segments: each member
// reduces a share of the elements where they lie, and writes it to the buffer of every member that
// takes the result;
// - small otherwise: every member shows its data with the first phase, and reduces everybody's into
// its own buffer;
// - large otherwise, with few members: the same, chunk by chunk through the slots;
// - large otherwise, with many: in each chunk a member reduces a share into its slot, from where
// each copies it to its own buffer.
#pragma once

#include <cstddef>
#include <memory>

#include "communicator/communicator.h"
#include "communicator/shm/phased_operation.h"

namespace hbm::shm {

struct ReductionBuffers {
  const void* in;
  void* out;  // used where the result goes
  size_t count;
  int root;        // index of the member that gets the result; -1: all do
  size_t divisor;  // of AVG: ranks in the whole group
};

// The part of `count` elements that is member `index`'s of `members`. Parts end at cache lines, so
// that no two members write to the same one; the last ones may be shorter, or empty.
ElementRange share_of(size_t count, size_t element, size_t members, size_t index);

class ShmReduction final : public PhasedOperation {
 public:
  ShmReduction(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
               const ReductionBuffers& buffers);

  void begin() override;
  bool peers_may_write() const override { return zero_copy_; }
  bool self_sufficient() const override { return small_ && count_ * element() < kZeroCopyBytes; }

 private:
  enum class Way { kUndecided, kZeroCopy, kClosing, kWhole, kShares };

  Progress next_phase() override;
  Progress decide();
  Progress one_slot();
  void prepare_zero_copy();
  Progress zero_copy();
  Progress whole_chunk();
  Progress shares_of_chunk();
  void post(size_t chunk);
  void show_chunk(Slot& slot, size_t chunk);
  bool is_tiny() const { return count_ * element() <= kTinyBytes; }  // and so small
  void reduce_shares(size_t chunk);
  void collect(size_t chunk);

  ElementRange chunk(size_t index) const;
  ElementRange share(size_t count, size_t member) const {
    return share_of(count, element(), shm_group_->size(), member);
  }
  bool takes_result() const;

  const ReductionBuffers buffers_;
  const bool small_;    // one chunk, which everybody reduces
  const size_t chunk_;  // elements
  const size_t chunks_;
  bool zero_copy_ = false;  // this rank's buffer is where others may read and write
  Way way_ = Way::kUndecided;
  size_t sink_count_ = 0;  // kZeroCopy: members that get the result
  // kWhole, kShares: chunk; kZeroCopy: elements of this rank's share that are done.
  size_t next_ = 0;
};

}  // namespace hbm::shm
