// Moves a stream from each member to each other. broadcast, allgather, gather, scatter, alltoall
// and barrier are this operation.
#pragma once

#include <memory>
#include <vector>

#include "node/streams.h"

namespace hbm::node {

class Exchange final : public Streams {
 public:
  // `outgoing` and `incoming` by member; what a member has for itself is copied in begin().
  Exchange(std::shared_ptr<Team> team, const Signature& signature, size_t count,
           std::vector<Source> outgoing, std::vector<Sink> incoming, Cast cast);

  using Streams::Cast;

  void begin() override;

 private:
  void deliver(size_t round) override;

  const Source own_source_;
  const std::vector<Sink> sinks_;
};

}  // namespace hbm::node
