// Moves a stream from each member to each other. broadcast, allgather, gather, scatter, alltoall
// and barrier are this operation.
#pragma once

#include <memory>
#include <vector>

#include "communicator/shm/streams.h"

namespace hbm::shm {

class StreamExchange final : public Streams {
 public:
  // `outgoing` and `incoming` by member; what a member has for itself is copied in begin().
  StreamExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count,
                 std::vector<Source> outgoing, std::vector<Sink> incoming, Cast cast);

  using Streams::Cast;

  void begin() override;

 private:
  bool deliver(size_t round) override;

  const Source own_source_;
  const std::vector<Sink> sinks_;
  size_t distance_ = 1;  // to the member whose part is copied next
  size_t copied_ = 0;    // bytes of that part
};

}  // namespace hbm::shm
