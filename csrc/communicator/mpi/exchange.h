// Moves one stream of bytes from each rank to each other, in rounds of at most one chunk a peer,
// two rounds in flight. allgather, gather, scatter, alltoall and barrier are this operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "communicator/mpi/communicator.h"
#include "communicator/mpi/pipeline.h"

namespace hbm::mpi {

class PairwiseExchange final : public Pipeline {
 public:
  // An outgoing stream and the peers that get it.
  struct Outgoing {
    Source source;
    std::vector<int> peers;
  };
  struct Incoming {
    Sink sink;
    int peer;
  };

  // `local` is what this rank gives itself, copied in begin().
  struct Local {
    Source source;
    Sink sink;
  };

  PairwiseExchange(std::shared_ptr<Channel> channel, const Signature& signature, size_t count,
                   std::vector<Outgoing> outgoing, std::vector<Incoming> incoming, Local local);

  void begin() override;
  bool self_sufficient() const override;

 private:
  void post(Round& round, size_t part) override;
  void deliver(const Round& round, size_t part) override;
  size_t parts_of(size_t count) const;
  size_t part_count(size_t part, size_t count) const;

  const std::vector<Outgoing> outgoing_;
  const std::vector<Incoming> incoming_;
  const Local local_;
  const size_t chunk_;  // elements a message
  size_t longest_ = 0;  // elements of the longest stream
};

}  // namespace hbm::mpi
