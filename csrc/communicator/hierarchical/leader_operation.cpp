#include "communicator/hierarchical/leader_operation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/log.h"
#include "communicator/hierarchical/tuning.h"

namespace hbm::hierarchical {

void LeaderOperation::tell(size_t leaders, size_t block_bytes) const {
  if (!log::enabled(log::Level::kDebug)) return;
  log::debug(describe() + ": " + std::to_string(layout_->nodes.size()) + " nodes, " +
             std::to_string(leaders) + (leaders == 1 ? " leader" : " leaders") + " of each, " +
             std::to_string(blocks_) + (blocks_ == 1 ? " block" : " blocks") + " of up to " +
             std::to_string(block_bytes) + " bytes");
}

Progress LeaderOperation::poll() {
  const bool crossed = poll_link();
  const bool stepped = poll_node();
  if (step_ == 2 * blocks_ && crossed_ == blocks_) return Progress::kDone;
  return crossed || stepped ? Progress::kActive : Progress::kIdle;
}

bool LeaderOperation::poll_link() {
  bool moved = false;
  const size_t ready = link_follows_node() ? entered_ : blocks_;
  while (started_ < ready && started_ - crossed_ < most_on_link()) {
    OperationPtr& operation = on_link_[started_ % on_link_.size()];
    operation = link(started_);
    if (operation) operation->begin();
    ++started_;
    moved = true;
  }
  for (size_t block = crossed_; block < started_; ++block) {
    OperationPtr& operation = on_link_[block % on_link_.size()];
    if (!operation) continue;
    const Progress progress = operation->poll();
    if (progress == Progress::kDone) operation.reset();
    moved = moved || progress != Progress::kIdle;
  }
  while (crossed_ < started_ && !on_link_[crossed_ % on_link_.size()]) ++crossed_;
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
    const Progress progress = in_node_->poll();
    if (progress != Progress::kDone) return progress != Progress::kIdle;
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

// MPI has no call to sleep in, so a rank that waits for the link polls for long before it sleeps.
// Nothing wakes it for both the node and the link. What TCP brings meanwhile waits in the kernel,
// and there are more blocks on the link, so a rank that waits for both sleeps for its node. Other
// links move only while they are polled.
Slept LeaderOperation::sleep(std::chrono::steady_clock::time_point until, bool polled) {
  if (in_node_ && !on_link()) return in_node_->sleep(until, polled);
  if (!polled) look_after_node();
  if (!polled || !layout_->arrivals) return Slept::kNoWakeup;
  if (!in_node_) return layout_->arrivals->sleep(until);
  if (!layout_->arrivals->connected()) return Slept::kNoWakeup;
  return in_node_->sleep(std::min(until, shm::Clock::now() + kLongestSleepForNode), polled);
}

void LeaderOperation::look_after_node() {
  const auto now = shm::Clock::now();
  if (now - looked_at_ < kNodeCheckPeriod) return;
  looked_at_ = now;
  layout_->shm_group->require_alive(layout_->nodes[layout_->node], *this, [] { return false; });
}

std::string LeaderOperation::describe() const {
  const shm::ShmGroup& shm_group = *layout_->shm_group;
  return hbm::describe(make_header(signature_, count_, 0, 0),
                       shm_group.member(shm_group.self()).rank, shm_group.group());
}

// Every stage counts: two live ranks may wait for one another in one block, and for a dead one in
// the next.
std::vector<int> LeaderOperation::ranks_of_stages(std::vector<int> (Operation::*list)()
                                                      const) const {
  std::vector<int> ranks;
  const auto add = [&ranks, list](const OperationPtr& operation) {
    if (!operation) return;
    const std::vector<int> its = (operation.get()->*list)();
    ranks.insert(ranks.end(), its.begin(), its.end());
  };
  for (size_t block = crossed_; block < started_; ++block) add(on_link_[block % on_link_.size()]);
  add(in_node_);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// Blocks that are not on the link yet need their peers once more.
std::vector<int> LeaderOperation::needed() const {
  std::vector<int> ranks = ranks_of_stages(&Operation::needed);
  if (started_ == blocks_) return ranks;
  const std::vector<int> later = linked_from(started_);
  ranks.insert(ranks.end(), later.begin(), later.end());
  return ranks;
}

std::vector<int> LeaderOperation::linked_from(size_t) const {
  std::vector<int> ranks;
  const bool leads = std::ranges::any_of(on_link_, [](const auto& one) { return one != nullptr; });
  if (!leads) return ranks;
  const mpi::Channel& column = *layout_->column.front();
  for (int peer = 0; peer < column.size; ++peer) {
    if (peer != column.rank) ranks.push_back(column.group_rank(peer));
  }
  return ranks;
}

void LeaderOperation::abandon() noexcept {
  if (in_node_) in_node_->abandon();
  for (const OperationPtr& operation : on_link_) {
    if (operation) operation->abandon();
  }
}

}  // namespace hbm::hierarchical
