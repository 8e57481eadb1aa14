// reduce_scatter within a node: every member reduces what the others have for it, in the order of
// the members, straight from their segments or from their slots.
#pragma once

#include <memory>
#include <vector>

#include "communicator/shm/streams.h"

namespace hbm::shm {

class ShmReduceScatter final : public Streams {
 public:
  // `count`: elements, as errors report them. `divisor` (of AVG): ranks in the whole group.
  ShmReduceScatter(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                   const std::vector<Source>& inputs, void* out, size_t divisor);

 private:
  bool deliver(size_t round) override;

  const Source own_;
  std::byte* const out_;
  const size_t divisor_;
  size_t reduced_ = 0;  // bytes of the result
};

}  // namespace hbm::shm
