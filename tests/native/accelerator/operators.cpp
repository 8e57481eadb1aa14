// The operators of the test accelerator. The operators that most tests need, to make, fill, copy
// and multiply tensors, are queued on the current stream, as on a GPU. All others run on the CPU,
// on copies.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <utility>

#include "memory.h"
#include "streams.h"

namespace late {
namespace {

// The address, sizes and type of a tensor, for a task of a stream. Like a kernel's arguments, a
// View does not keep the memory allocated. tensor() makes a CPU tensor of the memory.
class View {
 public:
  explicit View(const at::Tensor& tensor)
      : data_(address_of(tensor)),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        type_(tensor.scalar_type()),
        conjugate_(tensor.is_conj()),
        negative_(tensor.is_neg()) {}

  at::Tensor tensor() const {
    at::Tensor plain = at::from_blob(data_, sizes_, strides_, at::TensorOptions(type_));
    plain._set_conj(conjugate_);
    plain._set_neg(negative_);
    return plain;
  }

 private:
  static void* address_of(const at::Tensor& tensor) {
    void* const data = const_cast<void*>(tensor.const_data_ptr());
    return tensor.is_cpu() || data == nullptr ? data : by_stream(data);
  }

  void* data_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::ScalarType type_;
  bool conjugate_;
  bool negative_;
};

// Queues a task on the current stream. The task keeps no tensor alive, as on a GPU: the allocators
// alone must keep the memory that a stream uses.
template <class Task>
void enqueue_for(const at::Tensor& tensor, Task task) {
  enqueue(current_stream(tensor.device()), [task = std::move(task)] {
    const at::NoGradGuard plain;
    task();
  });
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   type.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           type.value_or(at::kFloat));
}

// Returns the address and the size of the memory from a host tensor's first to its last element.
std::pair<const void*, size_t> host_memory(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(),
          at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())};
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Tensor& on_device = to.is_cpu() ? from : to;
  const at::Tensor& other = to.is_cpu() ? to : from;
  const c10::Stream stream = current_stream(on_device.device());
  if (!other.is_cpu()) {
    enqueue(stream, [from = View(from), to = View(to)] { to.tensor().copy_(from.tensor()); });
    return to;
  }
  const auto [address, bytes] = host_memory(other);
  const Direction direction = to.is_cpu() ? Direction::kToHost : Direction::kToDevice;
  begin_use_of_host(address, bytes, /*writes=*/to.is_cpu());
  enqueue(stream, [from = View(from), to = View(to), address = address, bytes = bytes, direction] {
    await_copy(direction);
    to.tensor().copy_(from.tensor());
    end_use_of_host(address, bytes);
    count_copy(direction);
  });
  if (!non_blocking) synchronize(stream);
  return to;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize());
  if (bytes > impl->storage().nbytes()) {
    const c10::OptionalDeviceGuard guard(self.device());
    impl->unsafe_storage().set_data_ptr_noswap(device_allocator()->allocate(bytes));
    impl->unsafe_storage().set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (!from.sizes().equals(to.sizes())) to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  enqueue_for(self, [self = View(self), value] { self.tensor().fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Tensor& multiply(at::Tensor& self, const at::Tensor& factor) {
  if (factor.is_cpu()) {  // a Python number
    enqueue_for(self, [self = View(self), factor] { self.tensor().mul_(factor); });
  } else {
    enqueue_for(
        self, [self = View(self), factor = View(factor)] { self.tensor().mul_(factor.tensor()); });
  }
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data(), stream);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("fill_.Scalar", &fill);
  library.impl("zero_", &zero);
  library.impl("mul_.Tensor", &multiply);
  library.impl("record_stream", &record_stream);
}

// Tests make sparse tensors and read their indices and values, but compute nothing with them.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims_and_tensors",
               &at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("_indices", &at::native::_indices_sparse);
  library.impl("_values", &at::native::_values_sparse);
  library.impl("indices", &at::native::indices_sparse);
  library.impl("values", &at::native::values_sparse);
  library.impl("_nnz", &at::native::_nnz_sparse);
  library.impl("sparse_dim", &at::native::sparse_dim_sparse);
  library.impl("dense_dim", &at::native::dense_dim_sparse);
  library.impl("is_coalesced", &at::native::is_coalesced_sparse);
}

}  // namespace
}  // namespace late
