#include "communicator/hierarchical/multi_leader_allreduce.h"

#include <algorithm>
#include <string>
#include <utility>

#include "communicator/shm/reduction.h"
#include "communicator/shm/streams.h"

namespace hbm::hierarchical {
namespace {

constexpr size_t kOneLeaderBytes = 64 << 10;  // up to here several leaders only add messages
constexpr size_t kLeastShardBytes = 256 << 10;
constexpr size_t kMostShardBytes = 2 << 20;
constexpr size_t kBlocksToOverlap = 4;
constexpr std::chrono::milliseconds kLookEvery{20};

// Elements of a block: enough blocks to keep both the node and the network busy.
size_t block_size(size_t count, size_t leaders, size_t element) {
  const size_t shard = count / (leaders * kBlocksToOverlap) + 1;
  return leaders * std::clamp(shard, kLeastShardBytes / element, kMostShardBytes / element);
}

}  // namespace

MultiLeaderAllreduce::MultiLeaderAllreduce(std::shared_ptr<const NodeLayout> layout,
                                           const Signature& signature, void* data, size_t count)
    : layout_(std::move(layout)),
      signature_(signature),
      data_(static_cast<std::byte*>(data)),
      count_(count),
      leaders_(count * element_size(signature.dtype) <= kOneLeaderBytes ? 1 : layout_->leaders),
      block_(block_size(count, leaders_, element_size(signature.dtype))),
      blocks_(std::max<size_t>(1, (count + block_ - 1) / block_)) {}

bool MultiLeaderAllreduce::supports(Dtype dtype, ReduceOp op) noexcept {
  switch (dtype) {
    case Dtype::kFloat32:
    case Dtype::kFloat64:
    case Dtype::kComplex64:
    case Dtype::kComplex128:
      return true;
    default:
      return op != ReduceOp::kAvg;
  }
}

Progress MultiLeaderAllreduce::poll() {
  const bool crossed = poll_column();
  const bool stepped = poll_node();
  if (step_ == 2 * blocks_) return Progress::kDone;
  return crossed || stepped ? Progress::kActive : Progress::kIdle;
}

bool MultiLeaderAllreduce::poll_column() {
  if (!in_column_) {
    if (!leads() || crossed_ == reduced_) return false;
    const ElementRange mine = shard(crossed_, layout_->shm_group->self());
    in_column_ = layout_->column->allreduce(signature_.sequence, at(mine.offset), at(mine.offset),
                                            mine.count, signature_.dtype, signature_.reduce_op);
    in_column_->begin();
    return true;
  }
  const Progress progress = in_column_->poll();
  if (progress == Progress::kDone) {
    in_column_.reset();
    ++crossed_;
  }
  return progress != Progress::kIdle;
}

bool MultiLeaderAllreduce::poll_node() {
  if (!in_node_) {
    if (step_ == 2 * blocks_) return false;
    const bool ready = reduces(step_) || !leads() || block_of(step_) < crossed_;
    if (!ready) return false;
    in_node_ = reduces(step_) ? reduce_to_leaders(block_of(step_)) : hand_out(block_of(step_));
    in_node_->begin();
    return true;
  }
  const Progress progress = in_node_->poll();
  if (progress == Progress::kDone) {
    in_node_.reset();
    if (reduces(step_)) ++reduced_;
    ++step_;
  }
  return progress != Progress::kIdle;
}

size_t MultiLeaderAllreduce::block_of(size_t step) const {
  if (reduces(step)) return (step + 1) / 2;
  return step % 2 == 0 ? step / 2 - 1 : blocks_ - 1;
}

// The mean is taken across nodes, of the nodes' sums.
OperationPtr MultiLeaderAllreduce::reduce_to_leaders(size_t block) const {
  Signature signature = signature_;
  if (signature.reduce_op == ReduceOp::kAvg) signature.reduce_op = ReduceOp::kSum;
  std::vector<Source> inputs(layout_->shm_group->size());
  for (size_t leader = 0; leader < leaders_; ++leader) {
    const ElementRange part = shard(block, leader);
    inputs[leader] = {at(part.offset), part.count};
  }
  void* const out = leads() ? at(shard(block, layout_->shm_group->self()).offset) : nullptr;
  return std::make_unique<shm::ShmReduceScatter>(layout_->shm_group, signature, count_, inputs, out,
                                                 /*divisor=*/1);
}

OperationPtr MultiLeaderAllreduce::hand_out(size_t block) const {
  const size_t self = layout_->shm_group->self();
  std::vector<Source> sources(layout_->shm_group->size());
  std::vector<Sink> sinks(layout_->shm_group->size());
  for (size_t leader = 0; leader < leaders_; ++leader) {
    const ElementRange part = shard(block, leader);
    sinks[leader] = {at(part.offset), part.count};
    if (leader == self) sources.assign(sources.size(), {at(part.offset), part.count});
  }
  return std::make_unique<shm::StreamExchange>(layout_->shm_group, signature_, count_,
                                               std::move(sources), std::move(sinks),
                                               shm::StreamExchange::Cast::kMulti);
}

ElementRange MultiLeaderAllreduce::block(size_t index) const {
  const size_t offset = std::min(index * block_, count_);
  return {offset, std::min(block_, count_ - offset)};
}

ElementRange MultiLeaderAllreduce::shard(size_t index, size_t leader) const {
  const ElementRange whole = block(index);
  const ElementRange part =
      shm::share_of(whole.count, element_size(signature_.dtype), leaders_, leader);
  return {whole.offset + part.offset, part.count};
}

// MPI gives no notice, so a rank that waits for it polls, and looks after its group meanwhile.
bool MultiLeaderAllreduce::wait(std::chrono::steady_clock::time_point until) {
  if (!in_column_ && in_node_) return in_node_->wait(until);
  const auto now = shm::Clock::now();
  if (now - looked_at_ < kLookEvery) return false;
  looked_at_ = now;
  std::vector<int> ranks;
  for (size_t i = 0; i < layout_->shm_group->size(); ++i) {
    ranks.push_back(layout_->shm_group->member(i).rank);
  }
  layout_->shm_group->require_alive(ranks, *this, [] { return false; });
  return false;
}

std::string MultiLeaderAllreduce::describe() const {
  const shm::ShmGroup& shm_group = *layout_->shm_group;
  return hbm::describe(make_header(signature_, count_, 0, 0),
                       shm_group.member(shm_group.self()).rank, shm_group.group());
}

std::vector<int> MultiLeaderAllreduce::missing() const {
  if (!in_column_) return in_node_ ? in_node_->missing() : std::vector<int>();
  std::vector<int> ranks;
  for (const int place : in_column_->missing()) {
    ranks.push_back(layout_->column_ranks[static_cast<size_t>(place)]);
  }
  return ranks;
}

void MultiLeaderAllreduce::abandon() noexcept {
  if (in_node_) in_node_->abandon();
  if (in_column_) in_column_->abandon();
}

}  // namespace hbm::hierarchical
