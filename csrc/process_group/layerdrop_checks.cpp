#include "process_group/layerdrop_checks.h"

#include <c10/core/ScalarType.h>

#include <numeric>
#include <sstream>
#include <string>

#include "base/error.h"
#include "kernels/layerdrop_passes.h"

namespace hbm::layerdrop {
namespace {

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw Error(ErrorKind::kInvalid, text.str());
}

std::optional<Dtype> known_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kDouble:
      return Dtype::kFloat64;
    default:
      return std::nullopt;
  }
}

void check_flat(const at::Tensor& tensor, const std::string& name) {
  require(tensor.device().is_cpu(), name, " lies on ", tensor.device().str(),
          "; layer dropping takes tensors of the CPU");
  require(tensor.layout() == at::kStrided, name, " has the layout ", tensor.layout(),
          "; layer dropping takes dense tensors");
  require(tensor.dim() == 1 && tensor.is_contiguous(), name, " has the shape ", tensor.sizes(),
          " and the strides ", tensor.strides(), "; pass it contiguous and flat, as by view(-1)");
  require(known_type(tensor.scalar_type()).has_value(), name, " is of type ",
          c10::toString(tensor.scalar_type()),
          "; layer dropping takes float32, bfloat16, float16 and float64");
}

std::string item(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

void check_apart_or_same(const at::Tensor& a, const std::string& name_of_a, const at::Tensor& b,
                         const std::string& name_of_b) {
  const bool same = a.const_data_ptr() == b.const_data_ptr() && a.scalar_type() == b.scalar_type();
  require(same || !share_memory(a, b), name_of_a, " shares a part of its memory with ", name_of_b,
          "; pass the same tensor, or one that lies apart");
}

void check_lengths(const char* a, size_t length_of_a, const char* b, size_t length_of_b) {
  require(length_of_a == length_of_b, a, " has ", length_of_a, " items and ", b, " has ",
          length_of_b, "; pass one of each for every layer");
}

void check_counts(const at::Tensor& a, const std::string& name_of_a, const at::Tensor& b,
                  const std::string& name_of_b) {
  require(a.numel() == b.numel(), name_of_a, " has ", a.numel(), " elements and ", name_of_b,
          " has ", b.numel(), "; they must have as many");
}

}  // namespace

Dtype type_of(const at::Tensor& tensor) { return known_type(tensor.scalar_type()).value(); }

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const auto* const from_a = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* const from_b = static_cast<const std::byte*>(b.const_data_ptr());
  return from_a < from_b + b.nbytes() && from_b < from_a + a.nbytes();
}

void check_accumulate(const std::vector<at::Tensor>& gradients,
                      const std::vector<std::optional<at::Tensor>>& before,
                      const std::vector<at::Tensor>& after) {
  check_lengths("gradients", gradients.size(), "before", before.size());
  check_lengths("gradients", gradients.size(), "after", after.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::string from = item("gradients", i), to = item("after", i), old = item("before", i);
    check_flat(gradients[i], from);
    check_flat(after[i], to);
    check_counts(gradients[i], from, after[i], to);
    check_apart_or_same(after[i], to, gradients[i], from);
    const char* wrong = measured_sum_unsupported(type_of(after[i]), type_of(gradients[i]));
    require(wrong == nullptr, from, " is ", dtype_name(type_of(gradients[i])), " and ", to, " is ",
            dtype_name(type_of(after[i])), ": ", wrong);
    if (!before[i]) continue;
    check_flat(*before[i], old);
    check_counts(*before[i], old, after[i], to);
    check_apart_or_same(after[i], to, *before[i], old);
    require(type_of(*before[i]) == type_of(after[i]), old, " is ", dtype_name(type_of(*before[i])),
            " and ", to, " is ", dtype_name(type_of(after[i])), "; they must be of one type");
  }
}

void check_pack(const std::vector<at::Tensor>& caches, const at::Tensor& wire) {
  check_flat(wire, "wire");
  int64_t total = 0;
  for (size_t i = 0; i < caches.size(); ++i) {
    const std::string name = item("caches", i);
    check_flat(caches[i], name);
    const char* wrong = pack_unsupported(type_of(wire), type_of(caches[i]));
    require(wrong == nullptr, name, " is ", dtype_name(type_of(caches[i])), " and wire is ",
            dtype_name(type_of(wire)), ": ", wrong);
    require(!share_memory(caches[i], wire), name, " shares memory with wire; pass a wire apart");
    total += caches[i].numel();
  }
  require(wire.numel() == total, "wire has ", wire.numel(), " elements and the caches have ", total,
          " together; they must have as many");
}

void check_unpack(const at::Tensor& wire, const at::Tensor& buffer,
                  const std::vector<int64_t>& begins, const std::vector<int64_t>& counts) {
  check_flat(wire, "wire");
  check_flat(buffer, "buffer");
  const char* wrong = unpack_unsupported(type_of(buffer), type_of(wire));
  require(wrong == nullptr, "wire is ", dtype_name(type_of(wire)), " and buffer is ",
          dtype_name(type_of(buffer)), ": ", wrong);
  const bool front = wire.const_data_ptr() == buffer.const_data_ptr() &&
                     wire.element_size() <= buffer.element_size();
  require(front || !share_memory(wire, buffer),
          "wire shares memory with buffer; it must lie apart, or be the front of buffer's memory "
          "and of a type of no more bytes");
  check_lengths("begins", begins.size(), "counts", counts.size());
  int64_t end = 0, total = 0;
  for (size_t i = 0; i < begins.size(); ++i) {
    require(counts[i] >= 0 && begins[i] >= end, item("begins", i), " is ", begins[i], " and ",
            item("counts", i), " is ", counts[i], "; the part must begin at ", end,
            ", where the one before ends, or behind it");
    require(begins[i] <= buffer.numel() && counts[i] <= buffer.numel() - begins[i],
            item("begins", i), " is ", begins[i], " and ", item("counts", i), " is ", counts[i],
            ", which reaches beyond the ", buffer.numel(), " elements of buffer");
    end = begins[i] + counts[i];
    total += counts[i];
  }
  require(wire.numel() == total, "wire has ", wire.numel(), " elements and the parts have ", total,
          " together; they must have as many");
}

void check_threshold(const std::vector<double>& representatives, const std::vector<int64_t>& sizes,
                     double ratio) {
  check_lengths("representatives", representatives.size(), "sizes", sizes.size());
  require(ratio >= 0 && ratio < 1, "ratio is ", ratio, "; it must be at least 0 and less than 1");
  for (size_t i = 0; i < sizes.size(); ++i) {
    require(sizes[i] >= 0, item("sizes", i), " is ", sizes[i], "; a layer has at least 0 elements");
  }
}

}  // namespace hbm::layerdrop
