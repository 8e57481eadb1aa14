#include "process_group/coalescing.h"

#include <utility>

#include "base/error.h"
#include "pg_hbm.h"
#include "process_group/types.h"

namespace hbm::process_group {

using c10d::OpType;

BatchedWork::BatchedWork(c10::intrusive_ptr<WorkHbm> work, int rank, OpType type,
                         std::function<void()> begin)
    : Work(rank, type), work_(std::move(work)), begin_(std::move(begin)), state_(State::kHeld) {}

BatchedWork::BatchedWork(int rank, const std::exception_ptr& refusal)
    : Work(rank, OpType::COALESCED), refusal_(refusal), state_(State::kRefused) {}

void BatchedWork::begin() {
  if (begun()) return;
  const std::lock_guard lock(mutex_);
  if (begun()) return;
  if (refused()) std::rethrow_exception(refusal_);
  try {
    begin_();
    state_.store(State::kBegun, std::memory_order_release);
  } catch (...) {
    refusal_ = std::current_exception();
    state_.store(State::kRefused, std::memory_order_release);
    throw;
  }
}

void BatchedWork::refuse(const std::exception_ptr& refusal) {
  const std::lock_guard lock(mutex_);
  if (begun() || refused()) return;
  refusal_ = refusal;
  state_.store(State::kRefused, std::memory_order_release);
}

std::exception_ptr BatchedWork::exception() const {
  if (refused()) return refusal_;
  return begun() ? work_->exception() : nullptr;
}

bool BatchedWork::isCompleted() { return refused() || (begun() && work_->isCompleted()); }

bool BatchedWork::isSuccess() const { return begun() && work_->isSuccess(); }

int BatchedWork::sourceRank() const { return begun() ? work_->sourceRank() : -1; }

std::vector<at::Tensor> BatchedWork::result() {
  begin();
  return work_->result();
}

bool BatchedWork::wait(std::chrono::milliseconds timeout) {
  begin();
  return work_->wait(timeout);
}

c10::intrusive_ptr<c10::ivalue::Future> BatchedWork::getFuture() {
  begin();
  return work_->getFuture();
}

void BatchedWork::abort() {
  if (work_) work_->abort();
}

void ProcessGroupHbm::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  const bool added = batches_.insert_or_assign(std::this_thread::get_id(), CoalescedBatch()).second;
  if (added) batch_count_.fetch_add(1, std::memory_order_relaxed);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::endCoalescing() {
  CoalescedBatch batch = take_batch();
  if (batch.refusal) {
    for (const auto& message : batch.messages) message->refuse(batch.refusal);
    std::rethrow_exception(batch.refusal);
  }
  try {
    for (const auto& message : batch.messages) message->begin();
  } catch (...) {
    for (const auto& message : batch.messages) message->refuse(std::current_exception());
    throw;
  }
  auto works = std::move(batch.collectives);
  works.insert(works.end(), batch.messages.begin(), batch.messages.end());
  return c10::make_intrusive<WorkAll>(rank_, OpType::COALESCED, std::move(works));
}

void ProcessGroupHbm::drop_batch() {
  const CoalescedBatch batch = take_batch();
  const auto refusal = to_torch(std::make_exception_ptr(
      Error(ErrorKind::kInvalid, "a message did not begin, because its batch raised an error")));
  for (const auto& message : batch.messages) message->refuse(refusal);
}

CoalescedBatch ProcessGroupHbm::take_batch() {
  const std::lock_guard lock(coalescing_mutex_);
  const auto node = batches_.extract(std::this_thread::get_id());
  if (node.empty()) return {};
  batch_count_.fetch_sub(1, std::memory_order_relaxed);
  return std::move(node.mapped());
}

template <class Use>
bool ProcessGroupHbm::with_batch(const Use& use) {
  if (!coalescing()) return false;
  const std::lock_guard lock(coalescing_mutex_);
  use(batches_.at(std::this_thread::get_id()));
  return true;
}

// Returns true if the calling thread has a batch. Only that thread adds and removes the batch, so
// its relaxed load of the count sees its own change.
bool ProcessGroupHbm::coalescing() {
  if (batch_count_.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(coalescing_mutex_);
  return batches_.contains(std::this_thread::get_id());
}

void ProcessGroupHbm::join_batch(const c10::intrusive_ptr<WorkHbm>& work) {
  with_batch([&](CoalescedBatch& batch) { batch.collectives.push_back(work); });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::refused_in_batch(const std::exception_ptr& error) {
  c10::intrusive_ptr<c10d::Work> work;
  with_batch([&](CoalescedBatch& batch) {
    if (!batch.refusal) batch.refusal = error;  // a null error changes nothing
    if (batch.refusal) work = c10::make_intrusive<BatchedWork>(rank_, batch.refusal);
  });
  return work;
}

// The Work may outlive the group, so it holds only a weak reference to the group.
c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::defer(PreparedMessage message) {
  const auto group = c10::weak_intrusive_ptr<ProcessGroupHbm>(
      c10::intrusive_ptr<ProcessGroupHbm>::unsafe_reclaim_from_nonowning(this));
  const auto shared = std::make_shared<PreparedMessage>(std::move(message));
  auto work = c10::make_intrusive<BatchedWork>(shared->work, rank_, shared->call.kind->type, [=] {
    const auto alive = group.lock();
    TORCH_CHECK_WITH(DistBackendError, alive.defined(),
                     "a message of a batch cannot begin: its group was destroyed before the batch "
                     "ended");
    translated([&] { alive->begin(std::move(*shared)); });
  });
  with_batch([&](CoalescedBatch& batch) { batch.messages.push_back(work); });
  return work;
}

}  // namespace hbm::process_group
