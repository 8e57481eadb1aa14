#include "process_group/sparse_host_copy.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/StreamGuard.h>

#include <utility>

namespace hbm::process_group {
namespace {

// Returns the implementation of the tensor, which has its indices and values. PyTorch's operators
// that return indices and values exist for some devices only.
at::SparseTensorImpl& impl_of(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

}  // namespace

SparseHostCopy::SparseHostCopy(at::Tensor tensor, std::shared_ptr<DeviceStreams> streams)
    : tensor_(std::move(tensor)), streams_(std::move(streams)), caller_(streams_->current()) {}

Copies SparseHostCopy::to_host() {
  const at::Tensor indices = impl_of(tensor_).indices();
  const at::Tensor values = impl_of(tensor_).values();
  indices_ = streams_->host_copy(indices);
  values_ = streams_->host_copy(values);
  return {{indices_, indices}, {values_, values}};
}

at::Tensor SparseHostCopy::coalesced() const {
  return at::sparse_coo_tensor(indices_, values_, tensor_.sizes()).coalesce();
}

Copies SparseHostCopy::to_device() {
  const at::AutoDispatchBelowADInplaceOrView plain;
  const c10::StreamGuard guard(streams_->to_device());
  Copies copies;
  for (const at::Tensor& part : {impl_of(sum_).indices(), impl_of(sum_).values()}) {
    const at::Tensor host_copy = streams_->host_copy(part);
    host_copy.copy_(part);
    copies.emplace_back(at::empty(part.sizes(), part.options().device(streams_->device())),
                        host_copy);
    streams_->keep_for(copies.back().first, caller_);
  }
  impl_of(tensor_).set_indices_and_values_unsafe(copies[0].first, copies[1].first);
  impl_of(tensor_).set_coalesced(true);
  return copies;
}

}  // namespace hbm::process_group
