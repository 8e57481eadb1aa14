// What the collectives over MPI share: their channel, their signature and their name in errors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator/message.h"
#include "communicator/mpi/channel.h"
#include "progress/operation.h"

namespace hbm::mpi {

// A message of up to this many bytes of payload leaves at once (MPI's eager protocol), whether or
// not the receiver is there. MPICH's own limit lies near 8,000 bytes and depends on the network.
inline constexpr size_t kEagerBytes = 4096;

class GroupOperation : public Operation {
 public:
  GroupOperation(std::shared_ptr<Channel> channel, const Signature& signature, size_t count)
      : channel_(std::move(channel)), signature_(signature), count_(count) {}

  std::string describe() const override {
    return hbm::describe(make_header(signature_, count_, 0, 0)) + " on rank " +
           std::to_string(channel_->rank) + " of " + channel_->group;
  }

 protected:
  size_t size() const { return static_cast<size_t>(channel_->size); }
  size_t rank() const { return static_cast<size_t>(channel_->rank); }
  size_t element() const { return element_size(signature_.dtype); }

  // The other ranks, the next one first, so that not all ranks write to rank 0 at once.
  std::vector<int> peers() const {
    std::vector<int> others;
    for (int step = 1; step < channel_->size; ++step) {
      others.push_back((channel_->rank + step) % channel_->size);
    }
    return others;
  }

  const std::shared_ptr<Channel> channel_;
  const Signature signature_;
  const size_t count_;  // elements, as errors report it
};

// The ranks that several rounds wait for, each once, in ascending order.
inline std::vector<int> merge(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  a.erase(std::unique(a.begin(), a.end()), a.end());
  return a;
}

}  // namespace hbm::mpi
