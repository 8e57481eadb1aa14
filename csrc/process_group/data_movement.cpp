// The collectives of the process group that only move data.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "communicator/scatter_gather.h"
#include "pg_hbm.h"
#include "process_group/types.h"

namespace hbm::process_group {

using communicator::ElementRange;
using communicator::OperationNumber;
using communicator::Sink;
using communicator::Source;

using c10d::OpType;

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::broadcast(std::vector<at::Tensor>& tensors,
                                                          const c10d::BroadcastOptions& opts) {
  return guarded([&] {
    const at::Tensor& tensor = single(tensors, "broadcast");
    const int root = check_root(opts.rootRank, "broadcast");
    const Dtype dtype = to_dtype(tensor.scalar_type());
    StagedTensors staged = stage(tensor, "broadcast");
    const Sink data = staged.in_place(tensor);
    return run({&operations::kBroadcast, tensors, tensors, opts.timeout, opts.asyncOp},
               std::move(staged), {data.count},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange range) {
                 const Sink part = part_of(data, range, element_size(dtype));
                 return communicator->broadcast(sequence, part.data, part.count, dtype, root);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return guarded([&] {
    const at::Tensor& input = single(inputs, "all_gather: input");
    if (outputs.size() != 1) {
      throw Error(ErrorKind::kInvalid, "all_gather: expected one list of outputs, got " +
                                           std::to_string(outputs.size()));
    }
    return run(allgather_part(outputs.front(), input, opts, nullptr));
  });
}

ProcessGroupHbm::Collective ProcessGroupHbm::allgather_part(
    const std::vector<at::Tensor>& outputs, const at::Tensor& input,
    const c10d::AllgatherOptions& opts, const std::function<void()>& part_done) {
  check_tensor(input, "all_gather: input");
  check_list(outputs.size(), "all_gather", "the output list");
  check_tensors(outputs, "all_gather: output");
  check_same_type(input, outputs.front(), "all_gather");
  check_same_count(input, outputs[static_cast<size_t>(rank_)], "all_gather: the input",
                   "the output for this rank");
  check_outputs(outputs, "all_gather: outputs");
  check_apart({input}, outputs, rank_, "all_gather");
  const Dtype dtype = to_dtype(input.scalar_type());
  StagedTensors staged = stage(input, "all_gather");
  const Source in = staged.input(input);
  const std::vector<Sink> outs = staged.outputs(outputs);
  const EqualStreams streams = equal_streams(outputs, input);
  return {{&operations::kAllGather, {input}, outputs, opts.timeout, opts.asyncOp, part_done},
          std::move(staged),
          streams,
          [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                       ElementRange range) {
            const size_t element = element_size(dtype);
            return communicator->allgather(sequence, part_of(in, range, element),
                                           parts_of(outs, range, element), dtype);
          }};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return guarded([&] { return run(allgather_base_part(output, input, opts, nullptr)); });
}

ProcessGroupHbm::Collective ProcessGroupHbm::allgather_base_part(
    const at::Tensor& output, const at::Tensor& input, const c10d::AllgatherOptions& opts,
    const std::function<void()>& part_done) {
  check_tensor(output, "all_gather_into_tensor: output");
  check_tensor(input, "all_gather_into_tensor: input");
  check_same_type(input, output, "all_gather_into_tensor");
  check_parts(output, input, size_, "all_gather_into_tensor: the output", "the input");
  const Dtype dtype = to_dtype(input.scalar_type());
  StagedTensors staged = stage(input, "all_gather_into_tensor");
  const Source in = staged.input(input);
  const std::vector<Sink> outs = split_evenly(staged.output(output), size_, element_size(dtype));
  check_own_part(rank_, output, input, "all_gather_into_tensor");
  return {
      {&operations::kAllGatherIntoTensor, {input}, {output}, opts.timeout, opts.asyncOp, part_done},
      std::move(staged),
      {in.count, outs.size()},
      [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                   ElementRange range) {
        const size_t element = element_size(dtype);
        return communicator->allgather(sequence, part_of(in, range, element),
                                       parts_of(outs, range, element), dtype);
      }};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::run_all(std::vector<Collective> collectives,
                                                        OpType type) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (Collective& collective : collectives) works.push_back(run(std::move(collective)));
  return c10::make_intrusive<WorkAll>(rank_, type, std::move(works));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return guarded([&] {
    check_list(output_lists.size(), "all_gather_coalesced", "the list of output lists");
    for (const auto& list : output_lists) {
      check_pairs(list.size(), inputs.size(), "all_gather_coalesced");
    }
    const auto part_done =
        range_of_parts(range_title(options_->backend, operations::kAllGather), inputs);
    std::vector<Collective> parts;
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::vector<at::Tensor> outputs;
      for (const auto& list : output_lists) outputs.push_back(list[i]);
      parts.push_back(allgather_part(outputs, inputs[i], opts, part_done));
    }
    return run_all(std::move(parts), OpType::ALLGATHER_COALESCED);
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return guarded([&] {
    check_pairs(outputs.size(), inputs.size(), "all_gather_into_tensor_coalesced");
    const auto part_done =
        range_of_parts(range_title(options_->backend, operations::kAllGatherIntoTensor), inputs);
    std::vector<Collective> parts;
    for (size_t i = 0; i < outputs.size(); ++i) {
      parts.push_back(allgather_base_part(outputs[i], inputs[i], opts, part_done));
    }
    return run_all(std::move(parts), kAllgatherCoalesced);
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::gather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& opts) {
  return guarded([&] {
    const at::Tensor& input = single(inputs, "gather: input");
    const int root = check_root(opts.rootRank, "gather");
    const std::vector<at::Tensor> gathered =
        root_list(outputs, root, "gather", "gather_list", input);
    check_outputs(gathered, "gather: outputs");
    check_apart(inputs, gathered, rank_, "gather");
    const Dtype dtype = to_dtype(input.scalar_type());
    StagedTensors staged = stage(input, "gather");
    const Source in = staged.input(input);
    const std::vector<Sink> outs = staged.outputs(gathered);
    return run({&operations::kGather, inputs, gathered, opts.timeout, opts.asyncOp},
               std::move(staged), {in.count, static_cast<size_t>(size_)},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange range) {
                 const size_t element = element_size(dtype);
                 return communicator->gather(sequence, part_of(in, range, element),
                                             parts_of(outs, range, element), dtype, root);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::gather_single(at::Tensor& output, at::Tensor& input,
                                                              const c10d::GatherOptions& opts) {
  return guarded([&] {
    check_tensor(input, "gather_single: input");
    const int root = check_root(opts.rootRank, "gather_single");
    const Dtype dtype = to_dtype(input.scalar_type());
    StagedTensors staged = stage(input, "gather_single");
    const Source in = staged.input(input);
    std::vector<Sink> outs;
    if (root == rank_) {
      check_tensor(output, "gather_single: output");
      check_same_type(input, output, "gather_single");
      check_parts(output, input, size_, "gather_single: the output", "the input");
      outs = split_evenly(staged.output(output), size_, element_size(dtype));
      check_own_part(rank_, output, input, "gather_single");
    }
    return run({&operations::kGatherSingle, {input}, {output}, opts.timeout, opts.asyncOp},
               std::move(staged), {in.count, static_cast<size_t>(size_)},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange range) {
                 const size_t element = element_size(dtype);
                 return communicator->gather(sequence, part_of(in, range, element),
                                             parts_of(outs, range, element), dtype, root);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& opts) {
  return guarded([&] {
    const at::Tensor& output = single(outputs, "scatter: output");
    const int root = check_root(opts.rootRank, "scatter");
    const std::vector<at::Tensor> scattered =
        root_list(inputs, root, "scatter", "scatter_list", output);
    check_apart(scattered, outputs, rank_, "scatter");
    const Dtype dtype = to_dtype(output.scalar_type());
    StagedTensors staged = stage(output, "scatter");
    const std::vector<Source> ins = staged.inputs(scattered);
    const Sink out = staged.output(output);
    return run({&operations::kScatter, scattered, outputs, opts.timeout, opts.asyncOp},
               std::move(staged), {out.count, static_cast<size_t>(size_)},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange range) {
                 const size_t element = element_size(dtype);
                 return communicator->scatter(sequence, parts_of(ins, range, element),
                                              part_of(out, range, element), dtype, root);
               });
  });
}

// Returns the root's list of tensors, one for each rank; an empty list on other ranks. Throws if a
// tensor of the list differs from `own`, this rank's tensor, in its type or number of elements.
std::vector<at::Tensor> ProcessGroupHbm::root_list(
    const std::vector<std::vector<at::Tensor>>& lists, int root, const char* operation,
    const char* argument, const at::Tensor& own) const {
  const std::string name = std::string(operation) + ": " + argument;
  if (root != rank_) {
    if (!lists.empty() && !lists.front().empty()) {
      throw Error(ErrorKind::kInvalid, name + " must be given on the root (rank " +
                                           std::to_string(root) + ") alone, and rank " +
                                           std::to_string(rank_) + " gave one");
    }
    return {};
  }
  if (lists.size() != 1) {
    throw Error(ErrorKind::kInvalid,
                name + " is missing on the root (rank " + std::to_string(root) + ")");
  }
  check_list(lists.front().size(), operation, argument);
  check_tensors(lists.front(), name.c_str());
  check_same_type(lists.front().front(), own, operation);
  for (const at::Tensor& tensor : lists.front()) {
    check_same_count(tensor, own, (name + ": a tensor").c_str(), "this rank's");
  }
  return lists.front();
}

namespace {

// Returns one slice of `whole` for each rank. Without splits, the slices are equal, along dimension
// 0.
template <typename Part>
std::vector<Part> slices(const Part& whole, const at::Tensor& tensor,
                         const std::vector<int64_t>& splits, int ranks, const char* which) {
  const std::string name = std::string("all_to_all_single: ") + which;
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> lengths = splits;
  if (splits.empty()) {
    if (rows % ranks != 0) {
      throw Error(ErrorKind::kInvalid, name + " has " + std::to_string(rows) +
                                           " rows, which do not divide among " +
                                           std::to_string(ranks) + " ranks; give split sizes");
    }
    lengths.assign(static_cast<size_t>(ranks), rows / ranks);
  }
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const bool negative =
      std::any_of(lengths.begin(), lengths.end(), [](int64_t n) { return n < 0; });
  if (lengths.size() != static_cast<size_t>(ranks) || total != rows || negative) {
    throw Error(ErrorKind::kInvalid, name + " split sizes must be " + std::to_string(ranks) +
                                         " numbers, none negative, that sum up to its " +
                                         std::to_string(rows) + " rows; got " +
                                         std::to_string(lengths.size()) + " with sum " +
                                         std::to_string(total));
  }
  const size_t row = rows == 0 ? 0 : static_cast<size_t>(tensor.numel() / rows);
  std::vector<Part> parts;
  auto* at = static_cast<decltype(std::declval<Part>().data)>(whole.data);
  for (const int64_t length : lengths) {
    const size_t count = static_cast<size_t>(length) * row;
    parts.push_back({at, count});
    at = offset(at, count * tensor.itemsize());
  }
  return parts;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& opts) {
  return guarded([&] {
    check_tensor(output, "all_to_all_single: output");
    check_tensor(input, "all_to_all_single: input");
    check_same_type(input, output, "all_to_all_single");
    check_disjoint({input, output}, "all_to_all_single: input and output");
    const Dtype dtype = to_dtype(input.scalar_type());
    StagedTensors staged = stage(input, "all_to_all_single");
    const auto sources = slices(staged.input(input), input, input_splits, size_, "input");
    const auto sinks = slices(staged.output(output), output, output_splits, size_, "output");
    check_same_count_self(sources, sinks, rank_, "all_to_all_single");
    return run({&operations::kAllToAllSingle, {input}, {output}, opts.timeout, opts.asyncOp},
               std::move(staged), {},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange /*all*/) {
                 return communicator->alltoall(sequence, sources, sinks, dtype);
               });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::alltoall(std::vector<at::Tensor>& outputs,
                                                         std::vector<at::Tensor>& inputs,
                                                         const c10d::AllToAllOptions& opts) {
  return guarded([&] {
    check_list(outputs.size(), "all_to_all", "the output list");
    check_list(inputs.size(), "all_to_all", "the input list");
    check_tensors(inputs, "all_to_all: input");
    check_tensors(outputs, "all_to_all: output");
    check_same_type(inputs.front(), outputs.front(), "all_to_all");
    check_outputs(outputs, "all_to_all: outputs");
    check_apart(inputs, outputs, -1, "all_to_all");
    const Dtype dtype = to_dtype(inputs.front().scalar_type());
    StagedTensors staged = stage(inputs.front(), "all_to_all");
    const auto sources = staged.inputs(inputs);
    const auto sinks = staged.outputs(outputs);
    check_same_count_self(sources, sinks, rank_, "all_to_all");
    return run({&operations::kAllToAll, inputs, outputs, opts.timeout, opts.asyncOp},
               std::move(staged), {},
               [=, communicator = connection_.communicator](const OperationNumber& sequence,
                                                            ElementRange /*all*/) {
                 return communicator->alltoall(sequence, sources, sinks, dtype);
               });
  });
}

}  // namespace hbm::process_group
