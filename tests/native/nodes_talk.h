// Ranks that form groups over several simulated nodes, over real MPI.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives_conversation.h"
#include "communicator/connect/connect.h"
#include "file_store.h"
#include "mpi_ranks.h"
#include "seeds.h"

namespace hbm::communicator {

// Returns the ranks of each node of a layout. A layout has a letter for each rank, which names the
// rank's node. In "aab", ranks 0 and 1 share a node, and rank 2 is on another node.
inline std::vector<std::vector<size_t>> nodes_of(const std::string& layout) {
  std::vector<std::vector<size_t>> nodes;
  std::map<char, size_t> index_of;
  for (size_t rank = 0; rank < layout.size(); ++rank) {
    const auto [node, added] = index_of.try_emplace(layout[rank], nodes.size());
    if (added) nodes.emplace_back();
    nodes[node->second].push_back(rank);
  }
  return nodes;
}

inline bool is_integer(Dtype dtype) { return dtype <= Dtype::kInt64; }
inline bool is_narrow(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat8E4M3FN;
}

// Returns the expected result of a reduction over several nodes. First the inputs of each node's
// ranks are reduced, in the order of ranks, then the nodes' results, in the order of nodes. Each of
// the two stages rounds. But a mean of integers is rounded once, as if all ranks were on one node.
inline Bytes reduced_over(const std::string& layout, const std::vector<Bytes>& inputs, size_t count,
                          Dtype dtype, ReduceOp op) {
  const auto nodes = nodes_of(layout);
  const bool mean = op == ReduceOp::kAvg;
  const size_t ranks = inputs.size();
  if (nodes.size() == 1 || (mean && is_integer(dtype))) return in_order(inputs, count, dtype, op);
  const bool divide_first = mean && is_narrow(dtype) && nodes.size() < ranks;
  std::vector<Bytes> parts;
  for (const auto& members : nodes) {
    std::vector<Bytes> theirs;
    for (const size_t rank : members) theirs.push_back(inputs[rank]);
    const ReduceOp within = mean && !divide_first ? ReduceOp::kSum : op;
    parts.push_back(reduced(theirs, count, dtype, within, ranks));
  }
  return reduced(parts, count, dtype, divide_first ? ReduceOp::kSum : op, ranks);
}

// A group of the ranks of `layout`, and this rank's end of a conversation in it.
class NodesTalk {
 public:
  NodesTalk(const ForkedRank& rank, const std::string& name, const std::string& layout,
            uint64_t staging_bytes)
      : made_(connected(rank, name, layout, staging_bytes)),
        ordered_(queue(progress::OperationQueue::Order::kOrdered)),
        transfers_(queue(progress::OperationQueue::Order::kUnordered)),
        conversation_(
            {.rank = rank.rank,
             .size = rank.size,
             .collectives = made_.communicator,
             .ordered = ordered_,
             .transfers = transfers_,
             .sequence = &sequence_,
             .sizes = {0, 1, 2, 13, 101, 1009, 4096, 20'011, 65'536, 96'000, 300'007, 600'011},
             .most_bytes = 700'000,
             .memory = kinds_of_memory(),
             .reduced =
                 [layout](const std::vector<Bytes>& inputs, size_t count, Dtype dtype,
                          ReduceOp op) { return reduced_over(layout, inputs, count, dtype, op); }},
            test_seed()) {}
  ~NodesTalk() {
    ordered_->stop();
    transfers_->stop();
    made_.peers->stop();
  }

  Conversation* operator->() { return &conversation_; }
  Communicator& communicator() { return *made_.communicator; }

  uint64_t next() { return ++sequence_; }

  // Returns the kinds of memory for tensors: private memory, and the group's segment.
  std::vector<Allocate> kinds_of_memory() const { return {private_memory, shared_memory()}; }

  // Runs a collective to its end and returns its error.
  std::exception_ptr run(OperationPtr operation,
                         std::chrono::milliseconds timeout = mpi::kTimeout) {
    const auto request = ordered_->enqueue(std::move(operation), timeout, {});
    ordered_->launch(request, progress::Mode::kSync);
    if (request->error()) made_.communicator->invalidate();
    return request->error();
  }

  // Runs a collective to its end and returns the facts that it has noted.
  progress::Observation observed(OperationPtr operation) {
    progress::Observation found;
    const progress::Operation* const running = operation.get();
    const auto request =
        ordered_->enqueue(std::move(operation), mpi::kTimeout,
                          {{}, [running, &found] { found = running->observed(); }});
    ordered_->launch(request, progress::Mode::kSync);
    EXPECT_FALSE(request->error());
    return found;
  }

 private:
  static connect::GroupConnection connected(const ForkedRank& rank, const std::string& name,
                                            const std::string& layout, uint64_t staging_bytes) {
    setenv("HBMCOMM_NODE_ID", std::string(1, layout[static_cast<size_t>(rank.rank)]).c_str(), 1);
    const auto folder = rank.directory / name;
    std::filesystem::create_directories(folder);
    const auto store = std::make_shared<FileStore>(folder);
    return connect::connect({.store = store,
                             .job_store = store,
                             .global_ranks = {},
                             .heartbeat = mpi::kTimeout,
                             .rank = rank.rank,
                             .size = rank.size,
                             .group = "group " + name,
                             .deadline = std::chrono::steady_clock::now() + mpi::kTimeout,
                             .version = "test",
                             .transport = bootstrap::default_transport(),
                             .parameter_server = "",
                             .policy = memory::Policy::kDdr,
                             .staging_bytes = staging_bytes});
  }

  std::shared_ptr<progress::OperationQueue> queue(progress::OperationQueue::Order order) const {
    const auto peers = made_.peers;
    return progress::OperationQueue::create(
        order, made_.oversubscribed,
        {[peers](const progress::Operation& operation) { peers->check(operation); },
         [peers](const progress::Operation& operation, const std::exception_ptr& error) {
           return peers->explain(operation, error);
         },
         [peers](const std::exception_ptr& error) { report(*peers, error); },
         [communicator = made_.communicator] { communicator->wake(); },
         [peers](const std::vector<int>& ranks) { return peers->list(ranks); }});
  }

  static void report(Peers& peers, const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& failure) {
      peers.report_failure(failure);
    }
  }

  Allocate shared_memory() const {
    return [segment = made_.segment](size_t bytes) {
      auto* const block = static_cast<std::byte*>(segment->allocate(bytes));
      return std::shared_ptr<std::byte>(block, [segment](std::byte* at) { segment->free(at); });
    };
  }

  connect::GroupConnection made_;
  uint64_t sequence_ = 0;
  std::shared_ptr<progress::OperationQueue> ordered_;
  std::shared_ptr<progress::OperationQueue> transfers_;
  Conversation conversation_;
};

// Returns once all ranks have called part().
inline void part(const ForkedRank& rank) {
  FileStore store(rank.directory);
  const auto until = std::chrono::steady_clock::now() + mpi::kTimeout;
  store.set("parts " + std::to_string(rank.rank), "", until);
  std::vector<std::string> all;
  for (int r = 0; r < rank.size; ++r) all.push_back("parts " + std::to_string(r));
  EXPECT_TRUE(bootstrap::await_keys(store, all, until));
}

}  // namespace hbm::communicator
