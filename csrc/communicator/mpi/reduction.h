// Reductions to one rank or to all. Small ones take one round: everybody gets everybody's data, and
// reduces it alike. Large ones go block by block: in each, every rank reduces one shard (first
// phase) and hands it on (second phase), with two blocks in flight. Either way an element is
// reduced in rank order, so the two give the same bits.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "communicator/mpi/pipeline.h"

namespace hbm::mpi {

struct MpiReduction {
  const void* in;
  void* out;
  size_t count;
  int root;  // -1: all ranks get the result
};

class OneShotReduction final : public GroupOperation {
 public:
  OneShotReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                   const MpiReduction& reduction);

  void begin() override;
  Progress poll() override;
  std::vector<int> missing() const override { return round_.missing(); }
  void abandon() noexcept override { round_.abandon(); }
  bool self_sufficient() const override { return bytes() <= kEagerBytes; }

 private:
  size_t bytes() const { return reduction_.count * element(); }
  bool takes_result() const { return reduction_.root < 0 || reduction_.root == channel_->rank; }

  const MpiReduction reduction_;
  Round round_;
};

class BlockReduction final : public TwoPhase {
 public:
  BlockReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                 const MpiReduction& reduction);

 private:
  bool takes_result() const { return reduction_.root < 0 || reduction_.root == channel_->rank; }
  void post_first(Round& round, size_t block) override;
  void post_second(Round& round, const Round& first, size_t block) override;
  void deliver(const Round& second, size_t block) override;

  const MpiReduction reduction_;
};

}  // namespace hbm::mpi
