#include "communicator/shm/reduce_scatter.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace hbm::shm {

ShmReduceScatter::ShmReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                                   size_t count, const std::vector<Source>& inputs, void* out,
                                   size_t divisor)
    : Streams(shm_group, signature, count, inputs,
              std::vector<size_t>(shm_group->size(), inputs[shm_group->self()].count), Cast::kUni),
      own_(inputs[shm_group->self()]),
      out_(static_cast<std::byte*>(out)),
      divisor_(divisor) {}

bool ShmReduceScatter::deliver(size_t round) {
  const size_t bytes = own_.count * element();
  bool in_slots = false;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    in_slots = in_slots || (i != shm_group_->self() && incoming(i).direct == nullptr);
  }
  // The members' chunks are alike: they send the same numbers of elements to the same members.
  const size_t end = in_slots ? std::min((round + 1) * chunk(), bytes) : bytes;
  if (reduced_ >= end) return true;
  const size_t slice = std::min(end - reduced_, kBytesAPoll);
  auto& sources = shm_group_->sources();
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (i == shm_group_->self()) {
      sources[i] = static_cast<const std::byte*>(own_.data) + reduced_;
    } else if (incoming(i).direct != nullptr) {
      sources[i] = incoming(i).direct + reduced_;
    } else {
      const size_t in_round = reduced_ - round * chunk();
      sources[i] = shm_group_->data(shm_group_->slot(i)) + incoming(i).offset + in_round;
    }
  }
  reduce(out_ + reduced_, sources.data(), sources.size(), slice / element(), signature_.dtype,
         signature_.reduce_op, divisor_);
  reduced_ += slice;
  return reduced_ == end;
}

}  // namespace hbm::shm
