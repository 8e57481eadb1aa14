#include "communicator/hierarchical/leader_operation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/log.h"
#include "communicator/hierarchical/tuning.h"
#include "communicator/mpi/window.h"

namespace hbm::communicator::hierarchical {

void LeaderOperation::set_blocks(size_t blocks, size_t staging_bytes, size_t scratch_bytes) {
  blocks_ = blocks;
  staging_bytes_ = staging_bytes;
  size_t most = kMostBlocksAhead;
  if (scratch_bytes > 0) {
    most = std::clamp(kMostScratchBytes / scratch_bytes, kLeastBlocksAhead, kMostBlocksAhead);
  }
  ahead_ = std::min(most, blocks_);
}

size_t LeaderOperation::most_in_flight() const {
  if (layout_->rail.empty()) return mpi::kTagRanges;  // no leader
  return std::min<size_t>(mpi::rounds_in_flight(*layout_->rail.front(), staging_bytes_),
                          mpi::kTagRanges);
}

void LeaderOperation::log_cut(size_t leaders, size_t block_bytes) const {
  if (!log::enabled(log::Level::kDebug)) return;
  log::debug(describe() + ": " + std::to_string(layout_->nodes.size()) + " nodes, " +
             std::to_string(leaders) + (leaders == 1 ? " leader" : " leaders") + " of each, " +
             std::to_string(blocks_) + (blocks_ == 1 ? " block" : " blocks") + " of up to " +
             std::to_string(block_bytes) + " bytes");
}

progress::Progress LeaderOperation::poll() {
  const bool crossed = poll_inter_node();
  const bool stepped = poll_node();
  if (step_ == 2 * blocks_ && crossed_ == blocks_) return progress::Progress::kDone;
  return crossed || stepped ? progress::Progress::kActive : progress::Progress::kIdle;
}

bool LeaderOperation::poll_inter_node() {
  bool moved = false;
  const size_t ready = inter_node_follows_node() ? entered_ : blocks_;
  while (started_ < ready && started_ - crossed_ < most_in_flight()) {
    OperationPtr& operation = in_flight_[started_ % in_flight_.size()];
    operation = inter_node(started_);
    if (operation) operation->begin();
    ++started_;
    moved = true;
  }
  for (size_t block = crossed_; block < started_; ++block) {
    OperationPtr& operation = in_flight_[block % in_flight_.size()];
    if (!operation) continue;
    const progress::Progress progress = operation->poll();
    if (progress == progress::Progress::kDone) {
      observed_.add(operation->observed(), false);
      operation.reset();
    }
    moved = moved || progress != progress::Progress::kIdle;
  }
  while (crossed_ < started_ && !in_flight_[crossed_ % in_flight_.size()]) ++crossed_;
  return moved;
}

bool LeaderOperation::poll_node() {
  if (!in_node_) {
    if (step_ == 2 * blocks_) return false;
    const size_t block = block_of(step_);
    if (!goes_in(step_) && block >= crossed_) return false;
    in_node_ = goes_in(step_) ? node_in(block) : node_out(block);
    if (in_node_) {
      in_node_->begin();
      return true;
    }
  } else {
    const progress::Progress progress = in_node_->poll();
    if (progress != progress::Progress::kDone) return progress != progress::Progress::kIdle;
    observed_.add(in_node_->observed(), step_ == 0);
    in_node_.reset();
  }
  if (goes_in(step_)) ++entered_;
  ++step_;
  return true;
}

bool LeaderOperation::goes_in(size_t step) const {
  if (step < ahead()) return true;
  if (step >= 2 * blocks_ - ahead()) return false;
  return (step - ahead()) % 2 == 1;
}

size_t LeaderOperation::block_of(size_t step) const {
  if (step < ahead()) return step;
  if (step >= 2 * blocks_ - ahead()) return step - blocks_;
  return (step - ahead()) / 2 + (goes_in(step) ? ahead() : 0);
}

// A blocking wait of MPI has no deadline, and no other rank of the node can end it. So a rank that
// waits for other nodes polls for long before it sleeps. If MPI uses TCP, a rank that waits only
// for other nodes then sleeps until a message arrives. No call waits for both the node and the
// other nodes. A rank that waits for both sleeps until its node wakes it, for at most
// kLongestSleepForNode. During this sleep the kernel keeps data that arrives from other nodes, and
// further blocks are in flight. Over other transports nothing would wake the rank, because MPI
// makes progress only while it is polled.
progress::Slept LeaderOperation::sleep(std::chrono::steady_clock::time_point until, bool polled) {
  if (in_node_ && !inter_node_in_flight()) return in_node_->sleep(until, polled);
  if (!polled) check_node();
  if (!polled || !layout_->arrivals) return progress::Slept::kNoWakeup;
  if (!in_node_) return layout_->arrivals->sleep(until);
  if (!layout_->arrivals->connected()) return progress::Slept::kNoWakeup;
  return in_node_->sleep(std::min(until, shm::Clock::now() + kLongestSleepForNode), polled);
}

void LeaderOperation::check_node() {
  const auto now = shm::Clock::now();
  if (now - checked_at_ < kNodeCheckPeriod) return;
  checked_at_ = now;
  layout_->shm_group->require_alive(layout_->nodes[layout_->node], *this, [] { return false; });
}

std::string LeaderOperation::describe() const {
  const shm::ShmGroup& shm_group = *layout_->shm_group;
  return communicator::describe(make_header(signature_, count_, 0, 0),
                                shm_group.local_rank(shm_group.self()).group_rank,
                                shm_group.group());
}

// Merges the ranks of all stages that are in flight. In one block this rank may wait for a live
// rank, and in the next block for a dead rank.
std::vector<int> LeaderOperation::ranks_of_stages(std::vector<int> (progress::Operation::*list)()
                                                      const) const {
  std::vector<int> ranks;
  const auto add = [&ranks, list](const OperationPtr& operation) {
    if (!operation) return;
    const std::vector<int> its = (operation.get()->*list)();
    ranks.insert(ranks.end(), its.begin(), its.end());
  };
  for (size_t block = crossed_; block < started_; ++block)
    add(in_flight_[block % in_flight_.size()]);
  add(in_node_);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// Returns the ranks that the stages in flight need, and the peers of later blocks, whose inter-node
// stage has not begun.
std::vector<int> LeaderOperation::needed() const {
  std::vector<int> ranks = ranks_of_stages(&progress::Operation::needed);
  if (started_ == blocks_) return ranks;
  const std::vector<int> later = inter_node_peers(started_);
  ranks.insert(ranks.end(), later.begin(), later.end());
  return ranks;
}

std::vector<int> LeaderOperation::inter_node_peers(size_t) const {
  std::vector<int> ranks;
  const bool leads =
      std::ranges::any_of(in_flight_, [](const auto& one) { return one != nullptr; });
  if (!leads) return ranks;
  const mpi::Channel& rail = *layout_->rail.front();
  for (int peer = 0; peer < rail.size; ++peer) {
    if (peer != rail.rank) ranks.push_back(rail.group_rank(peer));
  }
  return ranks;
}

void LeaderOperation::abandon() noexcept {
  if (in_node_) in_node_->abandon();
  for (const OperationPtr& operation : in_flight_) {
    if (operation) operation->abandon();
  }
}

}  // namespace hbm::communicator::hierarchical
