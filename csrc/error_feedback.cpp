#include "error_feedback.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <span>
#include <sstream>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "kernels/copy.h"
#include "kernels/error_feedback_passes.h"

namespace hbm::error_feedback {
namespace {

// Checks of the arguments. Each check throws an Error(kInvalid) that names the argument, its value
// and the requirement.

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

Dtype type_of(const at::Tensor& tensor) { return known_type(tensor.scalar_type()).value(); }

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const auto* const from_a = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* const from_b = static_cast<const std::byte*>(b.const_data_ptr());
  return from_a < from_b + b.nbytes() && from_b < from_a + a.nbytes();
}

void check_flat(const at::Tensor& tensor, const std::string& name) {
  require(tensor.device().is_cpu(), name, " lies on ", tensor.device().str(),
          "; error feedback takes tensors of the CPU");
  require(tensor.layout() == at::kStrided, name, " has the layout ", tensor.layout(),
          "; error feedback takes dense tensors");
  require(tensor.dim() == 1 && tensor.is_contiguous(), name, " has the shape ", tensor.sizes(),
          " and the strides ", tensor.strides(), "; pass it contiguous and flat, as by view(-1)");
  require(known_type(tensor.scalar_type()).has_value(), name, " is of type ",
          c10::toString(tensor.scalar_type()),
          "; error feedback takes float32, bfloat16, float16 and float64");
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
    const char* wrong = kernels::measured_sum_unsupported(type_of(after[i]), type_of(gradients[i]));
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

void check_pack(const std::vector<at::Tensor>& residuals, const at::Tensor& wire) {
  check_flat(wire, "wire");
  int64_t total = 0;
  for (size_t i = 0; i < residuals.size(); ++i) {
    const std::string name = item("residuals", i);
    check_flat(residuals[i], name);
    const char* wrong = kernels::pack_unsupported(type_of(wire), type_of(residuals[i]));
    require(wrong == nullptr, name, " is ", dtype_name(type_of(residuals[i])), " and wire is ",
            dtype_name(type_of(wire)), ": ", wrong);
    require(!share_memory(residuals[i], wire), name, " shares memory with wire; pass a wire apart");
    total += residuals[i].numel();
  }
  require(wire.numel() == total, "wire has ", wire.numel(), " elements and the residuals have ",
          total, " together; they must have as many");
}

void check_unpack(const at::Tensor& wire, const at::Tensor& buffer,
                  const std::vector<int64_t>& begins, const std::vector<int64_t>& counts) {
  check_flat(wire, "wire");
  check_flat(buffer, "buffer");
  const char* wrong = kernels::unpack_unsupported(type_of(buffer), type_of(wire));
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

// The passes.

// A run of at most kPartElements elements of one of several arrays.
struct Part {
  size_t array;
  int64_t first;  // within the array
  int64_t at;     // within the concatenation of all arrays
  int64_t count;
};

std::vector<Part> cut(std::span<const int64_t> counts) {
  std::vector<Part> parts;
  int64_t at = 0;
  for (size_t array = 0; array < counts.size(); ++array) {
    for (int64_t first = 0; first < counts[array]; first += kPartElements) {
      const int64_t count = std::min(kPartElements, counts[array] - first);
      parts.push_back({array, first, at, count});
      at += count;
    }
  }
  return parts;
}

std::vector<int64_t> counts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

// Runs `work` for each part. Each thread has an equal share of the elements, and runs the parts
// that begin in its share.
template <class Work>
void for_each(const std::vector<Part>& parts, Work work) {
  if (parts.empty()) return;
  const int64_t elements = parts.back().at + parts.back().count;
  at::parallel_for(0, elements, kPartElements, [&](int64_t begin, int64_t end) {
    auto part = std::ranges::lower_bound(parts, begin, {}, &Part::at);
    for (; part != parts.end() && part->at < end; ++part) work(*part);
  });
}

std::byte* element(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + index * tensor.element_size();
}

const std::byte* const_element(const at::Tensor& tensor, int64_t index) {
  return static_cast<const std::byte*>(tensor.const_data_ptr()) + index * tensor.element_size();
}

// A bucket, cut into stretches of elements. A stretch with an even index becomes zeros; a stretch
// with an odd index is unpacked from a part of the wire.
struct Stretches {
  std::vector<int64_t> counts;
  std::vector<int64_t> sources;  // the offset of a part in the wire
};

Stretches stretches_of(int64_t total, const std::vector<int64_t>& begins,
                       const std::vector<int64_t>& counts) {
  Stretches all;
  int64_t end = 0, source = 0;
  for (size_t i = 0; i < begins.size(); ++i) {
    all.counts.insert(all.counts.end(), {begins[i] - end, counts[i]});
    all.sources.insert(all.sources.end(), {source, source});
    end = begins[i] + counts[i];
    source += counts[i];
  }
  all.counts.push_back(total - end);
  all.sources.push_back(source);
  return all;
}

// Unpacks to `to`, which begins at or after `from` and may overlap the packed elements. Works from
// the end, in blocks that it copies aside first, so that no unread element is overwritten.
bool unpack_forwards(std::byte* to, Dtype to_type, const std::byte* from, Dtype from_type,
                     size_t count) {
  constexpr size_t kBlock = 1024;
  std::array<std::byte, kBlock * sizeof(double)> saved;
  const size_t size = element_size(from_type);
  bool finite = true;
  for (size_t end = count; end > 0;) {
    const size_t begin = (end - 1) / kBlock * kBlock;
    std::memcpy(saved.data(), from + begin * size, (end - begin) * size);
    std::byte* const target = to + begin * element_size(to_type);
    finite &= kernels::unpack(target, saved.data(), end - begin, to_type, from_type);
    end = begin;
  }
  return finite;
}

bool unpack_part(std::byte* to, Dtype to_type, const std::byte* from, Dtype from_type,
                 size_t count) {
  const bool in_place = to == from && to_type == from_type;
  const bool overlap = from <= to && to < from + count * element_size(from_type);
  if (overlap && !in_place) return unpack_forwards(to, to_type, from, from_type, count);
  return kernels::unpack(to, from, count, to_type, from_type);
}

}  // namespace

at::Tensor accumulate(const std::vector<at::Tensor>& gradients,
                      const std::vector<std::optional<at::Tensor>>& before,
                      const std::vector<at::Tensor>& after, double factor, bool squares) {
  check_accumulate(gradients, before, after);
  size_t apart = 0;  // bytes written to memory that this call does not read
  for (size_t i = 0; i < after.size(); ++i) {
    const bool in_place =
        (before[i] && share_memory(*before[i], after[i])) || share_memory(gradients[i], after[i]);
    if (!in_place) apart += after[i].nbytes();
  }

  const std::vector<Part> parts = cut(counts_of(after));
  std::vector<kernels::Measure> measures(parts.size());
  for_each(parts, [&](const Part& part) {
    const size_t i = part.array;
    const kernels::MeasuredSum sum{
        .after = element(after[i], part.first),
        .before = before[i] ? const_element(*before[i], part.first) : nullptr,
        .gradient = const_element(gradients[i], part.first),
        .count = static_cast<size_t>(part.count),
        .factor = factor,
        .non_temporal = apart >= kernels::non_temporal_bytes(),
    };
    measures[&part - parts.data()] =
        kernels::measured_sum(sum, type_of(after[i]), type_of(gradients[i]), squares);
  });

  at::Tensor table = at::zeros({static_cast<int64_t>(after.size()), 2}, at::kDouble);
  double* const rows = table.mutable_data_ptr<double>();
  for (size_t k = 0; k < parts.size(); ++k) {
    double* const row = rows + 2 * parts[k].array;
    row[0] += measures[k].residual_sum;
    row[1] += measures[k].gradient_sum;
  }
  return table;
}

void pack(const std::vector<at::Tensor>& residuals, const at::Tensor& wire, double factor,
          double inverse) {
  check_pack(residuals, wire);
  for_each(cut(counts_of(residuals)), [&](const Part& part) {
    const at::Tensor& residual = residuals[part.array];
    const kernels::Packing packing{
        .wire = element(wire, part.at),
        .residual = element(residual, part.first),
        .count = static_cast<size_t>(part.count),
        .factor = factor,
        .inverse = inverse,
    };
    kernels::pack(packing, type_of(wire), type_of(residual));
  });
}

bool unpack(const at::Tensor& wire, const at::Tensor& buffer, const std::vector<int64_t>& begins,
            const std::vector<int64_t>& counts) {
  check_unpack(wire, buffer, begins, counts);
  const Stretches stretches = stretches_of(buffer.numel(), begins, counts);
  const std::vector<Part> parts = cut(stretches.counts);
  std::atomic<bool> finite = true;
  const auto fill = [&](const Part& part) {
    std::byte* const to = element(buffer, part.at);
    const auto count = static_cast<size_t>(part.count);
    if (part.array % 2 == 0) {
      std::memset(to, 0, count * buffer.element_size());
      return;
    }
    const std::byte* const from = const_element(wire, stretches.sources[part.array] + part.first);
    if (!unpack_part(to, type_of(buffer), from, type_of(wire), count)) {
      finite.store(false, std::memory_order_relaxed);
    }
  };
  if (share_memory(wire, buffer)) {
    // Starts with the last part, so that no unread part is overwritten.
    std::for_each(parts.rbegin(), parts.rend(), fill);
  } else {
    for_each(parts, fill);
  }
  return finite;
}

}  // namespace hbm::error_feedback
