#include "pg_sparse.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "mpi/group_operation.h"
#include "pg_types.h"

namespace hbm {
namespace {

// Three allgathers, one after the other: the numbers of indices, the indices, the values. They have
// one sequence number, and MPI keeps their messages in order.
class SparseAllreduce final : public mpi::GroupOperation {
 public:
  SparseAllreduce(mpi::ChannelPtr channel, const mpi::Signature& signature, at::Tensor tensor)
      : GroupOperation(std::move(channel), signature, static_cast<size_t>(tensor.numel())),
        tensor_(std::move(tensor)),
        counts_(size(), 0) {}

  void begin() override {
    const at::AutoDispatchBelowADInplaceOrView plain;
    const at::Tensor own = tensor_.coalesce();
    indices_ = own.indices().contiguous();
    values_ = own.values().contiguous();
    own_count_ = indices_.size(1);
    std::vector<mpi::Sink> sinks;
    for (int64_t& count : counts_) sinks.push_back({&count, 1});
    start(
        mpi::make_allgather(channel_, signature_.sequence, {&own_count_, 1}, sinks, Dtype::kInt64));
  }

  Progress poll() override {
    const Progress progress = stage_->poll();
    if (progress != Progress::kDone) return progress;
    switch (stages_done_++) {
      case 0:
        all_indices_ = gather(indices_.t().contiguous());
        return Progress::kActive;
      case 1:
        all_values_ = gather(values_);
        return Progress::kActive;
      default:
        add_up();
        return Progress::kDone;
    }
  }

  std::vector<int> missing() const override { return stage_->missing(); }
  void abandon() noexcept override {
    if (stage_) stage_->abandon();
  }
  bool self_sufficient() const override { return false; }

 private:
  void start(std::unique_ptr<Operation> stage) {
    stage_ = std::move(stage);
    stage_->begin();
  }

  // Starts the allgather of tensors that have counts_[r] rows on rank r.
  std::vector<at::Tensor> gather(const at::Tensor& own) {
    sent_ = own;
    std::vector<at::Tensor> received;
    std::vector<mpi::Sink> sinks;
    for (const int64_t rows : counts_) {
      std::vector<int64_t> shape = own.sizes().vec();
      shape.front() = rows;
      received.push_back(at::empty(shape, own.options()));
      sinks.push_back(
          {received.back().mutable_data_ptr(), static_cast<size_t>(received.back().numel())});
    }
    start(mpi::make_allgather(channel_, signature_.sequence,
                              {sent_.const_data_ptr(), static_cast<size_t>(sent_.numel())}, sinks,
                              to_dtype(own.scalar_type())));
    return received;
  }

  void add_up() {
    const at::AutoDispatchBelowADInplaceOrView plain;
    const auto sparse = [this](size_t r) {
      return at::sparse_coo_tensor(all_indices_[r].t(), all_values_[r], tensor_.sizes(),
                                   tensor_.options());
    };
    at::Tensor sum = sparse(0);
    for (size_t r = 1; r < size(); ++r) sum = at::add(sum, sparse(r)).coalesce();
    tensor_.copy_(sum.coalesce());
  }

  const at::Tensor tensor_;
  at::Tensor indices_;
  at::Tensor values_;
  at::Tensor sent_;  // of the stage that runs
  int64_t own_count_ = 0;
  std::vector<int64_t> counts_;
  std::vector<at::Tensor> all_indices_;  // of rank r: [counts_[r], sparse dimensions]
  std::vector<at::Tensor> all_values_;
  std::unique_ptr<Operation> stage_;
  int stages_done_ = 0;
};

}  // namespace

void check_sparse(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  if (tensors.size() != 1 || !tensors.front().is_sparse()) {
    throw Error(ErrorKind::kInvalid, "all_reduce of sparse tensors takes one sparse COO tensor");
  }
  if (!tensors.front().device().is_cpu()) {
    throw Error(ErrorKind::kInvalid, "all_reduce: the sparse tensor is on device " +
                                         tensors.front().device().str() +
                                         "; hbm takes CPU tensors only");
  }
  if (op.op_ != c10d::ReduceOp::SUM) {
    throw Error(ErrorKind::kUnsupported,
                std::string("all_reduce of a sparse tensor with ") +
                    reduce_op_name(to_reduce_op(op, to_dtype(tensors.front().scalar_type()))) +
                    ": only SUM is supported, because absent elements have no value");
  }
}

std::unique_ptr<Operation> make_sparse_allreduce(mpi::ChannelPtr channel, uint64_t sequence,
                                                 const at::Tensor& tensor) {
  const mpi::Signature signature{mpi::OpCode::kAllreduce, to_dtype(tensor.scalar_type()),
                                 ReduceOp::kSum, -1, sequence};
  return std::make_unique<SparseAllreduce>(std::move(channel), signature, tensor);
}

}  // namespace hbm
