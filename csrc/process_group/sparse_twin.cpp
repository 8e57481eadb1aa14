#include "process_group/sparse_twin.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/StreamGuard.h>

#include <utility>

namespace hbm {
namespace {

// The tensor's own indices and values, of which the operators that return them exist for some
// devices only.
at::SparseTensorImpl& impl_of(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

}  // namespace

SparseTwin::SparseTwin(at::Tensor tensor, std::shared_ptr<DeviceStreams> streams)
    : tensor_(std::move(tensor)), streams_(std::move(streams)), caller_(streams_->current()) {}

Copies SparseTwin::to_host() {
  const at::Tensor indices = impl_of(tensor_).indices();
  const at::Tensor values = impl_of(tensor_).values();
  indices_ = streams_->host_twin(indices);
  values_ = streams_->host_twin(values);
  return {{indices_, indices}, {values_, values}};
}

at::Tensor SparseTwin::coalesced() const {
  return at::sparse_coo_tensor(indices_, values_, tensor_.sizes()).coalesce();
}

Copies SparseTwin::to_device() {
  const at::AutoDispatchBelowADInplaceOrView plain;
  const c10::StreamGuard guard(streams_->to_device());
  Copies copies;
  for (const at::Tensor& part : {impl_of(sum_).indices(), impl_of(sum_).values()}) {
    const at::Tensor twin = streams_->host_twin(part);
    twin.copy_(part);
    copies.emplace_back(at::empty(part.sizes(), part.options().device(streams_->device())), twin);
    streams_->keep_for(copies.back().first, caller_);
  }
  impl_of(tensor_).set_indices_and_values_unsafe(copies[0].first, copies[1].first);
  impl_of(tensor_).set_coalesced(true);
  return copies;
}

}  // namespace hbm
