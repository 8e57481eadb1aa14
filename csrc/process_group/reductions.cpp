// The reducing collectives of the process group.
#include <utility>

#include "base/error.h"
#include "communicator/scatter_gather.h"
#include "pg_hbm.h"
#include "process_group/sparse.h"
#include "process_group/types.h"

namespace hbm::process_group {

using communicator::ElementRange;
using communicator::OperationNumber;
using communicator::Sink;
using communicator::Source;

using std::chrono::milliseconds;

Source ProcessGroupHbm::reduction_input(StagedTensors& staged, const at::Tensor& tensor,
                                        const c10d::ReduceOp& op) {
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) return staged.input_times(tensor, premul_factor(op));
  return staged.input(tensor);
}

Sink ProcessGroupHbm::reduction_in_place(StagedTensors& staged, const at::Tensor& tensor,
                                         const c10d::ReduceOp& op) {
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    return staged.in_place_times(tensor, premul_factor(op));
  }
  return staged.in_place(tensor);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& opts) {
  return guarded([&]() -> c10::intrusive_ptr<c10d::Work> {
    if (tensors.size() == 1 && tensors.front().defined() && tensors.front().is_sparse()) {
      return allreduce_sparse(tensors, opts);
    }
    const at::Tensor& tensor = single(tensors, "all_reduce");
    const Dtype dtype = to_dtype(tensor.scalar_type());
    const ReduceOp op = to_reduce_op(opts.reduceOp, dtype);
    if (auto work = allreduce_inline(tensors, dtype, op, opts)) return work;
    StagedTensors staged = stage(tensor, "all_reduce");
    const Sink data = reduction_in_place(staged, tensor, opts.reduceOp);
    return run({&operations::kAllReduce, tensors, tensors, opts.timeout, opts.asyncOp},
               std::move(staged), {data.count},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange range) {
                 const Sink part = part_of(data, range, element_size(dtype));
                 return communicator->allreduce(sequence, part.data, part.data, part.count, dtype,
                                                op);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::allreduce_inline(
    std::vector<at::Tensor>& tensors, Dtype dtype, ReduceOp op,
    const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = tensors.front();
  if (opts.asyncOp || op == ReduceOp::kPremulSum) return nullptr;
  if (!StagedTensors::usable(tensor) || at::hasCallbacks() ||
      !connection_.communicator->preallocates_allreduce(tensor.const_data_ptr(), tensor.nbytes())) {
    return nullptr;
  }
  queue_->require_owner("all_reduce");
  check_claims();
  if (coalescing()) return nullptr;
  const auto sequence = reduce_inline(tensor, dtype, op, timeout_or_default(opts.timeout));
  if (!sequence) return nullptr;
  auto work = c10::make_intrusive<WorkHbm>(rank_, operations::kAllReduce.type, nullptr, tensors,
                                           tensors, queue_, nullptr);
  work->bind(nullptr, *sequence);
  return work;
}

std::optional<uint64_t> ProcessGroupHbm::reduce_inline(const at::Tensor& tensor, Dtype dtype,
                                                       ReduceOp op,
                                                       std::chrono::milliseconds timeout) {
  auto profiled = this->profiled(operations::kAllReduce, -1, /*async=*/false, {&tensor, 1}, {});
  std::unique_lock issue(issue_mutex_);
  if (!queue_->try_claim("all_reduce")) return std::nullopt;
  const uint64_t sequence = ++sequence_;
  issue.unlock();
  const uint64_t entered = enter_in_profile(std::move(profiled), sequence);
  const int64_t count = tensor.numel();
  const uint64_t number = flight_record_->enter({.kind = &operations::kAllReduce,
                                                 .sequence = sequence,
                                                 .dtype = tensor.scalar_type(),
                                                 .input_elements = count,
                                                 .output_elements = count,
                                                 .timeout = timeout});
  progress::Operation& operation = *connection_.communicator->preallocated_allreduce(
      sequence, tensor.mutable_data_ptr(), static_cast<size_t>(count), dtype, op);
  progress::StagingHooks hooks;
  if (entered != 0) {  // in a hook: after run_claimed() another thread may replace the operation
    hooks.epilogue = [entered, &operation] { Profile::ended(entered, operation.observed()); };
  }
  queue_->run_claimed(operation, timeout, std::move(hooks));
  flight_record_->finish(number);
  return sequence;
}

// Reduces all tensors in one operation: copies them into one buffer, and the results back in order.
// So tensors may share memory: each tensor is reduced with its contents before the operation.
c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return guarded([&]() -> c10::intrusive_ptr<c10d::Work> {
    if (tensors.empty()) {
      throw Error(ErrorKind::kInvalid, "all_reduce_coalesced: the list of tensors is empty");
    }
    check_tensors(tensors, "all_reduce_coalesced");
    const Dtype dtype = to_dtype(tensors.front().scalar_type());
    const ReduceOp op = to_reduce_op(opts.reduceOp, dtype);
    const double factor = op == ReduceOp::kPremulSum ? premul_factor(opts.reduceOp) : 1.0;
    StagedTensors staged = stage(tensors.front(), "all_reduce_coalesced");
    const Sink data = staged.packed(tensors, factor);
    return run({&operations::kAllReduceCoalesced, tensors, tensors, opts.timeout, opts.asyncOp},
               std::move(staged), {},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange /*all*/) {
                 return communicator->allreduce(sequence, data.data, data.data, data.count, dtype,
                                                op);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::allreduce_sparse(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  return guarded([&]() -> c10::intrusive_ptr<c10d::Work> {
    check_sparse(tensors, opts.reduceOp);
    const at::Tensor& tensor = tensors.front();
    StagedTensors staged = stage(tensor, "all_reduce");
    const auto host_copy = staged.sparse(tensor);
    const auto own = [tensor, host_copy] {
      return host_copy ? host_copy->coalesced() : tensor.coalesce();
    };
    const auto take = [tensor, host_copy](const at::Tensor& sum) {
      if (host_copy) {
        host_copy->set_sum(sum);
      } else {
        tensor.copy_(sum);
      }
    };
    return run({&operations::kAllReduceSparse, tensors, tensors, opts.timeout, opts.asyncOp},
               std::move(staged), {},
               [=, communicator = connection_.communicator, size = size_](
                   const OperationNumber& sequence, ElementRange /*all*/) {
                 return make_sparse_allreduce(communicator, size, sequence.number, own, take);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::reduce(std::vector<at::Tensor>& tensors,
                                                       const c10d::ReduceOptions& opts) {
  return guarded([&] {
    const at::Tensor& tensor = single(tensors, "reduce");
    const int root = check_root(opts.rootRank, "reduce");
    const Dtype dtype = to_dtype(tensor.scalar_type());
    const ReduceOp op = to_reduce_op(opts.reduceOp, dtype);
    StagedTensors staged = stage(tensor, "reduce");
    const Sink out = root == rank_ ? reduction_in_place(staged, tensor, opts.reduceOp) : Sink{};
    const Source in = root == rank_ ? Source{out.data, out.count}
                                    : reduction_input(staged, tensor, opts.reduceOp);
    return run({&operations::kReduce, tensors, tensors, opts.timeout, opts.asyncOp},
               std::move(staged), {in.count},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange range) {
                 const Source from = part_of(in, range, element_size(dtype));
                 void* const to =
                     out.data == nullptr ? nullptr : part_of(out, range, element_size(dtype)).data;
                 return communicator->reduce(sequence, from.data, to, from.count, dtype, op, root);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return guarded([&] {
    const at::Tensor& output = single(outputs, "reduce_scatter: output");
    if (inputs.size() != 1) {
      throw Error(ErrorKind::kInvalid, "reduce_scatter: expected one list of inputs, got " +
                                           std::to_string(inputs.size()));
    }
    check_list(inputs.front().size(), "reduce_scatter", "the input list");
    check_tensors(inputs.front(), "reduce_scatter: input");
    check_same_type(inputs.front().front(), output, "reduce_scatter");
    const at::Tensor& own = inputs.front()[static_cast<size_t>(rank_)];
    check_same_count(own, output, "reduce_scatter: the input for this rank", "the output");
    check_apart(inputs.front(), outputs, rank_, "reduce_scatter");
    const Dtype dtype = to_dtype(output.scalar_type());
    const ReduceOp op = to_reduce_op(opts.reduceOp, dtype);
    StagedTensors staged = stage(output, "reduce_scatter");
    std::vector<Source> sources;
    for (const at::Tensor& input : inputs.front()) {
      sources.push_back(reduction_input(staged, input, opts.reduceOp));
    }
    const Sink out = staged.output(output);
    const EqualStreams streams = equal_streams(inputs.front(), output);
    return run({&operations::kReduceScatter, inputs.front(), outputs, opts.timeout, opts.asyncOp},
               std::move(staged), streams,
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange range) {
                 const size_t element = element_size(dtype);
                 return communicator->reduce_scatter(sequence, parts_of(sources, range, element),
                                                     part_of(out, range, element).data, dtype, op);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return guarded([&] { return run(reduce_scatter_base_part(output, input, opts)); });
}

ProcessGroupHbm::Collective ProcessGroupHbm::reduce_scatter_base_part(
    const at::Tensor& output, const at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  check_tensor(output, "reduce_scatter_tensor: output");
  check_tensor(input, "reduce_scatter_tensor: input");
  check_same_type(input, output, "reduce_scatter_tensor");
  check_parts(input, output, size_, "reduce_scatter_tensor: the input", "the output");
  const Dtype dtype = to_dtype(output.scalar_type());
  const ReduceOp op = to_reduce_op(opts.reduceOp, dtype);
  StagedTensors staged = stage(output, "reduce_scatter_tensor");
  const std::vector<Source> sources =
      split_evenly(reduction_input(staged, input, opts.reduceOp), size_, element_size(dtype));
  check_own_part(rank_, input, output, "reduce_scatter_tensor");
  const Sink out = staged.output(output);
  return {{&operations::kReduceScatterTensor, {input}, {output}, opts.timeout, opts.asyncOp},
          std::move(staged),
          {out.count, sources.size()},
          [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                       ElementRange range) {
            const size_t element = element_size(dtype);
            return communicator->reduce_scatter(sequence, parts_of(sources, range, element),
                                                part_of(out, range, element).data, dtype, op);
          }};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return guarded([&] {
    check_pairs(outputs.size(), inputs.size(), "reduce_scatter_tensor_coalesced");
    std::vector<Collective> parts;
    for (size_t i = 0; i < outputs.size(); ++i) {
      parts.push_back(reduce_scatter_base_part(outputs[i], inputs[i], opts));
    }
    return run_all(std::move(parts), kReduceScatterCoalesced);
  });
}

}  // namespace hbm::process_group
