#include "process_group/staged_tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "kernels/reduce.h"
#include "process_group/checks.h"
#include "process_group/types.h"

namespace hbm::process_group {

using communicator::Sink;
using communicator::Source;

namespace {

// Copies plain data, on any thread: autograd and inference mode do not affect the copies.
void copy_all(const Copies& copies) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  for (const auto& [to, from] : copies) to.copy_(from);
}

}  // namespace

bool StagedTensors::usable(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

const at::Tensor& StagedTensors::keep(at::Tensor tensor) {
  kept_.push_back(std::move(tensor));
  return kept_.back();
}

// Keeps, and returns, a contiguous, uninitialised tensor on the host, with the shape and type of
// `tensor`.
const at::Tensor& StagedTensors::keep_host_copy(const at::Tensor& tensor) {
  return keep(streams_ ? streams_->host_copy(tensor)
                       : at::empty_like(tensor, at::MemoryFormat::Contiguous));
}

Source StagedTensors::input(const at::Tensor& tensor) {
  const auto count = static_cast<size_t>(tensor.numel());
  if (usable(tensor)) return {keep(tensor).const_data_ptr(), count};
  const at::Tensor host_copy = keep_host_copy(tensor);
  copies_in_.emplace_back(host_copy, tensor);
  return {host_copy.const_data_ptr(), count};
}

Sink StagedTensors::output(const at::Tensor& tensor) {
  check_writable(tensor);
  const auto count = static_cast<size_t>(tensor.numel());
  if (usable(tensor)) return {keep(tensor).mutable_data_ptr(), count};
  const at::Tensor host_copy = keep_host_copy(tensor);
  copies_out_.emplace_back(tensor, host_copy);
  return {host_copy.mutable_data_ptr(), count};
}

Sink StagedTensors::in_place(const at::Tensor& tensor) {
  const Sink sink = output(tensor);
  if (!copies_out_.empty() && copies_out_.back().second.is_same(kept_.back())) {
    copies_in_.emplace_back(kept_.back(), tensor);
  }
  return sink;
}

Source StagedTensors::input_times(const at::Tensor& tensor, double factor) {
  const at::Tensor host_copy = keep_host_copy(tensor);
  copies_in_.emplace_back(host_copy, tensor);
  scalings_.push_back({host_copy, factor});
  return {host_copy.const_data_ptr(), static_cast<size_t>(tensor.numel())};
}

Sink StagedTensors::in_place_times(const at::Tensor& tensor, double factor) {
  const Sink sink = in_place(tensor);
  scalings_.push_back({kept_.back(), factor});
  return sink;
}

Sink StagedTensors::packed(const std::vector<at::Tensor>& tensors, double factor) {
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  const at::TensorOptions options = tensors.front().options();
  const at::Tensor whole =
      keep(streams_ ? streams_->host_tensor(count, options) : at::empty({count}, options));
  int64_t start = 0;
  for (const at::Tensor& tensor : tensors) {
    check_writable(tensor);
    const at::Tensor part = whole.narrow(0, start, tensor.numel()).view(tensor.sizes());
    copies_in_.emplace_back(part, tensor);
    copies_out_.emplace_back(tensor, part);
    start += tensor.numel();
  }
  if (factor != 1.0) scalings_.push_back({whole, factor});
  return {whole.mutable_data_ptr(), static_cast<size_t>(count)};
}

std::shared_ptr<SparseHostCopy> StagedTensors::sparse(const at::Tensor& tensor) {
  if (streams_) sparse_ = std::make_shared<SparseHostCopy>(keep(tensor), streams_);
  return sparse_;
}

std::vector<Source> StagedTensors::inputs(const std::vector<at::Tensor>& tensors) {
  std::vector<Source> sources;
  for (const at::Tensor& tensor : tensors) sources.push_back(input(tensor));
  return sources;
}

std::vector<Sink> StagedTensors::outputs(const std::vector<at::Tensor>& tensors) {
  std::vector<Sink> sinks;
  for (const at::Tensor& tensor : tensors) sinks.push_back(output(tensor));
  return sinks;
}

DeviceTransfer::Prepare StagedTensors::take_scalings() {
  if (scalings_.empty()) return {};
  return [scalings = std::move(scalings_)](const Chunks& chunks, size_t index) {
    for (const auto& [tensor, factor] : scalings) {
      const Dtype dtype = to_dtype(tensor.scalar_type());
      for (const auto& [start, count] : chunks.parts(static_cast<size_t>(tensor.numel()), index)) {
        void* const part = offset(tensor.mutable_data_ptr(), start * element_size(dtype));
        kernels::scale(part, part, count, dtype, factor);
      }
    }
  };
}

std::shared_ptr<DeviceTransfer> StagedTensors::take_transfer(const EqualStreams& streams) {
  if (!streams_) return nullptr;
  if (sparse_) {
    return std::make_shared<DeviceTransfer>(
        streams_, [host_copy = sparse_] { return host_copy->to_host(); },
        [host_copy = sparse_] { return host_copy->to_device(); });
  }
  const Copies& copies = copies_in_.empty() ? copies_out_ : copies_in_;
  const size_t element = copies.empty() ? 1 : copies.front().first.itemsize();
  return std::make_shared<DeviceTransfer>(streams_, std::exchange(copies_in_, {}),
                                          std::exchange(copies_out_, {}), take_scalings(),
                                          Chunks(streams, element, streams_->chunk_bytes()));
}

progress::StagingHooks StagedTensors::take_hooks(std::function<void()> at_end) {
  progress::StagingHooks hooks;
  if (!copies_in_.empty() || !scalings_.empty()) {
    hooks.prologue = [copies = std::move(copies_in_), scale_all = take_scalings()] {
      copy_all(copies);
      if (scale_all) scale_all(Chunks(), 0);
    };
  }
  hooks.epilogue = [kept = std::move(kept_), copies = std::move(copies_out_),
                    at_end = std::move(at_end)] {
    copy_all(copies);
    if (at_end) at_end();
  };
  return hooks;
}

EqualStreams equal_streams(const std::vector<at::Tensor>& parts, const at::Tensor& own) {
  const bool equal = std::ranges::all_of(
      parts, [&own](const at::Tensor& part) { return part.numel() == own.numel(); });
  return {equal ? static_cast<size_t>(own.numel()) : 0, parts.size()};
}

const void* offset(const void* data, size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

void* offset(void* data, size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

}  // namespace hbm::process_group
