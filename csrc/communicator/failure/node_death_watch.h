// How a rank learns that another node has lost its first rank: by a connection that the kernel
// closes when the process ends.
//
// The first ranks of the nodes form a ring. Within a node, deaths are known by pidfd
// (communicator/shm/shm_group.h); so every death has a witness, who tells all ranks through the
// store. A connection says nothing of a machine that lost its power: then the timeout does.
//
// A forked child closes its copies, so that it does not keep its parent's connections open.
//
// Threads: made by one thread; dead() may be called from any.
#pragma once

#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/fork.h"
#include "bootstrap/rendezvous.h"

namespace hbm::failure {

class NodeDeathWatch {
 public:
  // All ranks of the rendezvous call it. `node_of` numbers the ranks' nodes. A neighbour in the
  // ring that cannot be reached is named in the log.
  NodeDeathWatch(const bootstrap::Rendezvous& rendezvous, const std::vector<int>& node_of);

  ~NodeDeathWatch();
  NodeDeathWatch(const NodeDeathWatch&) = delete;
  NodeDeathWatch& operator=(const NodeDeathWatch&) = delete;

  // Ranks whose connection has ended.
  std::vector<int> dead() const;

 private:
  const ForkGuard fork_;
  std::vector<std::pair<int, Descriptor>> connections_;  // by rank
};

}  // namespace hbm::failure
