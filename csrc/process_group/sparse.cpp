#include "process_group/sparse.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "process_group/checks.h"
#include "process_group/types.h"

namespace hbm::process_group {
namespace {

using communicator::Communicator;
using communicator::OperationPtr;
using communicator::Sink;

// Describes a rank's tensor to the other ranks before the tensor is sent.
struct Outline {
  int64_t count;       // of indices
  int64_t sparse_dim;  // dimensions that have indices
  int64_t shape;       // a hash of the sizes
};

constexpr size_t kOutlineNumbers = sizeof(Outline) / sizeof(int64_t);

int64_t hash_of(c10::IntArrayRef sizes) {
  size_t hash = sizes.size();
  for (const int64_t size : sizes) hash = c10::hash_combine(hash, static_cast<size_t>(size));
  return static_cast<int64_t>(hash);
}

// Three allgathers, one after the other: outlines, indices, values. They share one sequence number,
// and every rank runs them in the same order.
class SparseAllreduce final : public progress::Operation {
 public:
  SparseAllreduce(std::shared_ptr<Communicator> communicator, int ranks, uint64_t sequence,
                  std::function<at::Tensor()> own, std::function<void(const at::Tensor&)> take)
      : communicator_(std::move(communicator)),
        sequence_(sequence),
        own_(std::move(own)),
        take_(std::move(take)),
        outlines_(static_cast<size_t>(ranks)) {}

  void begin() override {
    const at::AutoDispatchBelowADInplaceOrView plain;
    tensor_ = own_();
    indices_ = tensor_.indices().contiguous();
    values_ = tensor_.values().contiguous();
    own_outline_ = {indices_.size(1), tensor_.sparse_dim(), hash_of(tensor_.sizes())};
    std::vector<Sink> sinks;
    for (Outline& outline : outlines_) sinks.push_back({&outline, kOutlineNumbers});
    start(communicator_->allgather(sequence_, {&own_outline_, kOutlineNumbers}, sinks,
                                   Dtype::kInt64));
  }

  progress::Progress poll() override {
    const progress::Progress progress = stage_->poll();
    if (progress != progress::Progress::kDone) return progress;
    // The outlines are messages of hbm's own: only their wait counts.
    progress::Observation part = stage_->observed();
    if (stages_done_ == 0) part.staged = part.zero_copy = false;
    observed_.add(part, stages_done_ == 0);
    switch (stages_done_++) {
      case 0:
        check_outlines();
        all_indices_ = gather(indices_.t().contiguous());
        return progress::Progress::kActive;
      case 1:
        all_values_ = gather(values_);
        return progress::Progress::kActive;
      default:
        add_up();
        return progress::Progress::kDone;
    }
  }

  progress::Slept sleep(std::chrono::steady_clock::time_point until, bool polled) override {
    return stage_->sleep(until, polled);
  }
  std::string describe() const override {
    return "sparse allreduce #" + std::to_string(sequence_) + ", in which " +
           (stage_ ? stage_->describe() : "nothing has begun");
  }
  std::vector<int> missing() const override {
    return stage_ ? stage_->missing() : std::vector<int>();
  }
  std::vector<int> needed() const override {
    return stage_ ? stage_->needed() : std::vector<int>();
  }
  void abandon() noexcept override {
    if (stage_) stage_->abandon();
  }
  bool self_sufficient() const override { return false; }

 private:
  void start(std::unique_ptr<progress::Operation> stage) {
    stage_ = std::move(stage);
    stage_->begin();
  }

  void check_outlines() const {
    for (size_t r = 0; r < outlines_.size(); ++r) {
      const Outline& outline = outlines_[r];
      if (outline.sparse_dim == own_outline_.sparse_dim && outline.shape == own_outline_.shape) {
        continue;
      }
      throw Error(ErrorKind::kMismatch,
                  "ranks disagree in " + describe() + ": this rank's sparse tensor is of shape " +
                      c10::str(tensor_.sizes()) + " with " +
                      std::to_string(own_outline_.sparse_dim) + " sparse dimensions, rank " +
                      std::to_string(r) + "'s of another shape or with " +
                      std::to_string(outline.sparse_dim));
    }
  }

  // Starts the allgather of tensors with outlines_[r].count rows on rank r.
  std::vector<at::Tensor> gather(const at::Tensor& own) {
    sent_ = own;
    std::vector<at::Tensor> received;
    std::vector<Sink> sinks;
    for (const Outline& outline : outlines_) {
      std::vector<int64_t> shape = own.sizes().vec();
      shape.front() = outline.count;
      received.push_back(at::empty(shape, own.options()));
      sinks.push_back(
          {received.back().mutable_data_ptr(), static_cast<size_t>(received.back().numel())});
    }
    start(communicator_->allgather(sequence_,
                                   {sent_.const_data_ptr(), static_cast<size_t>(sent_.numel())},
                                   sinks, to_dtype(own.scalar_type())));
    return received;
  }

  void add_up() {
    const at::AutoDispatchBelowADInplaceOrView plain;
    const auto sparse = [this](size_t r) {
      return at::sparse_coo_tensor(all_indices_[r].t(), all_values_[r], tensor_.sizes(),
                                   tensor_.options());
    };
    at::Tensor sum = sparse(0);
    for (size_t r = 1; r < outlines_.size(); ++r) sum = at::add(sum, sparse(r)).coalesce();
    take_(sum.coalesce());
  }

  const std::shared_ptr<Communicator> communicator_;
  const uint64_t sequence_;
  const std::function<at::Tensor()> own_;
  const std::function<void(const at::Tensor&)> take_;
  at::Tensor tensor_;
  at::Tensor indices_;
  at::Tensor values_;
  at::Tensor sent_;  // the input of the current stage
  Outline own_outline_{};
  std::vector<Outline> outlines_;
  std::vector<at::Tensor> all_indices_;  // of rank r: [outlines_[r].count, sparse dimensions]
  std::vector<at::Tensor> all_values_;
  std::unique_ptr<progress::Operation> stage_;
  int stages_done_ = 0;
};

}  // namespace

void check_sparse(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  if (tensors.size() != 1 || !tensors.front().is_sparse()) {
    throw Error(ErrorKind::kInvalid, "all_reduce of sparse tensors takes one sparse COO tensor");
  }
  check_device(tensors.front(), "all_reduce: the sparse tensor");
  if (op.op_ != c10d::ReduceOp::SUM) {
    throw Error(ErrorKind::kUnsupported,
                std::string("all_reduce of a sparse tensor with ") +
                    reduce_op_name(to_reduce_op(op, to_dtype(tensors.front().scalar_type()))) +
                    ": only SUM is supported, because absent elements have no value");
  }
}

OperationPtr make_sparse_allreduce(std::shared_ptr<Communicator> communicator, int ranks,
                                   uint64_t sequence, std::function<at::Tensor()> own,
                                   std::function<void(const at::Tensor& sum)> take) {
  return std::make_unique<SparseAllreduce>(std::move(communicator), ranks, sequence, std::move(own),
                                           std::move(take));
}

}  // namespace hbm::process_group
