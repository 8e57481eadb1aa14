#include "process_group/checks.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>

#include "base/error.h"
#include "base/overlap.h"

namespace hbm::process_group {

void check_device(const at::Tensor& tensor, const char* argument) {
  if (tensor.is_cpu() || at::isAccelerator(tensor.device().type())) return;
  throw Error(ErrorKind::kInvalid, std::string(argument) + " is on device " +
                                       tensor.device().str() +
                                       "; hbm takes tensors on the CPU or an accelerator");
}

void check_tensor(const at::Tensor& tensor, const char* argument) {
  if (!tensor.defined()) {
    throw Error(ErrorKind::kInvalid, std::string(argument) + " is not a tensor");
  }
  check_device(tensor, argument);
  if (tensor.layout() != at::kStrided) {
    throw Error(ErrorKind::kInvalid,
                std::string(argument) +
                    " is not dense; sparse tensors are supported by all_reduce (COO) alone");
  }
}

void check_tensors(const std::vector<at::Tensor>& tensors, const char* argument) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, argument);
    if (tensor.scalar_type() != tensors.front().scalar_type()) {
      throw Error(ErrorKind::kInvalid, std::string(argument) + " mixes the types " +
                                           c10::toString(tensors.front().scalar_type()) + " and " +
                                           c10::toString(tensor.scalar_type()));
    }
    if (tensor.device() != tensors.front().device()) {
      throw Error(ErrorKind::kInvalid, std::string(argument) + " mixes the devices " +
                                           tensors.front().device().str() + " and " +
                                           tensor.device().str());
    }
  }
}

const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* argument) {
  if (tensors.size() != 1) {
    throw Error(ErrorKind::kInvalid, std::string(argument) + " must be one tensor, got a list of " +
                                         std::to_string(tensors.size()));
  }
  check_tensor(tensors.front(), argument);
  return tensors.front();
}

namespace {

struct Extent {
  uintptr_t begin;
  uintptr_t end;
  size_t index;
};

// Returns the addresses from a tensor's first to its last element.
Extent extent_of(const at::Tensor& tensor, size_t index) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + (static_cast<uintptr_t>(last) + 1) * tensor.itemsize(), index};
}

[[noreturn]] void throw_shared(const char* argument, size_t one, size_t other) {
  throw Error(ErrorKind::kInvalid, std::string(argument) + " " + std::to_string(one) + " and " +
                                       std::to_string(other) + " share memory; each needs its own");
}

}  // namespace

void check_outputs(const std::vector<at::Tensor>& tensors, const char* argument) {
  check_disjoint(tensors, argument);
  const auto array = [](const at::Tensor& tensor) -> StridedArray {
    return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), tensor.itemsize(), tensor.sizes(),
            tensor.strides()};
  };
  for (const at::Tensor& tensor : tensors) check_writable(tensor);
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t j = i + 1; j < tensors.size(); ++j) {
      if (tensors[i].is_contiguous() && tensors[j].is_contiguous()) continue;
      if (arrays_overlap(array(tensors[i]), array(tensors[j]))) throw_shared(argument, i, j);
    }
  }
}

void check_writable(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return;
  if (!elements_overlap(tensor.sizes(), tensor.strides())) return;
  std::ostringstream text;
  text << "an output tensor, with sizes " << tensor.sizes() << " and strides " << tensor.strides()
       << ", has elements that share memory (as expand() and as_strided() make them); clone() it";
  throw Error(ErrorKind::kInvalid, text.str());
}

void check_disjoint(const std::vector<at::Tensor>& tensors, const char* argument) {
  std::vector<Extent> extents;
  for (size_t i = 0; i < tensors.size(); ++i) {
    // A tensor that is not contiguous is not checked: the operation uses a contiguous copy of it.
    if (tensors[i].numel() > 0 && tensors[i].is_contiguous()) {
      extents.push_back(extent_of(tensors[i], i));
    }
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin >= extents[i - 1].end) continue;
    throw_shared(argument, extents[i - 1].index, extents[i].index);
  }
}

void check_same_type(const at::Tensor& input, const at::Tensor& output, const char* operation) {
  if (input.scalar_type() != output.scalar_type()) {
    throw Error(ErrorKind::kInvalid, std::string(operation) + ": the input is " +
                                         c10::toString(input.scalar_type()) + " and the output " +
                                         c10::toString(output.scalar_type()));
  }
  if (input.device() != output.device()) {
    throw Error(ErrorKind::kInvalid, std::string(operation) + ": the input is on " +
                                         input.device().str() + " and the output on " +
                                         output.device().str() + "; move one of them");
  }
}

void check_same_count(const at::Tensor& a, const at::Tensor& b, const char* name_of_a,
                      const char* name_of_b) {
  if (a.numel() == b.numel()) return;
  throw Error(ErrorKind::kInvalid, std::string(name_of_a) + " has " + std::to_string(a.numel()) +
                                       " elements and " + name_of_b + " has " +
                                       std::to_string(b.numel()));
}

void check_parts(const at::Tensor& whole, const at::Tensor& part, int ranks,
                 const char* name_of_whole, const char* name_of_part) {
  if (whole.numel() == part.numel() * ranks) return;
  throw Error(ErrorKind::kInvalid,
              std::string(name_of_whole) + " must have " + std::to_string(ranks) +
                  " times the elements of " + name_of_part + ", which has " +
                  std::to_string(part.numel()) + "; it has " + std::to_string(whole.numel()));
}

void check_own_part(int own, const at::Tensor& whole, const at::Tensor& part,
                    const char* operation) {
  const size_t own_offset = static_cast<size_t>(own) * part.nbytes();
  const auto* begin = static_cast<const std::byte*>(whole.const_data_ptr());
  if (part.const_data_ptr() == begin + own_offset) return;
  check_disjoint({whole, part}, (std::string(operation) + ": input and output").c_str());
}

void check_apart(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                 int own, const char* operation) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (size_t o = 0; o < outputs.size(); ++o) {
      const bool is_own = (inputs.size() == 1 || static_cast<int>(i) == own) &&
                          (outputs.size() == 1 || static_cast<int>(o) == own);
      if (is_own && inputs[i].const_data_ptr() == outputs[o].const_data_ptr()) continue;
      const Extent input = extent_of(inputs[i], i);
      const Extent output = extent_of(outputs[o], o);
      const bool both = inputs[i].is_contiguous() && outputs[o].is_contiguous() &&
                        inputs[i].numel() > 0 && outputs[o].numel() > 0;
      if (!both || input.end <= output.begin || output.end <= input.begin) continue;
      throw Error(ErrorKind::kInvalid, std::string(operation) + ": input " + std::to_string(i) +
                                           " and output " + std::to_string(o) +
                                           " share memory; each needs its own");
    }
  }
}

void check_pairs(size_t outputs, size_t inputs, const char* operation) {
  if (outputs == inputs && outputs > 0) return;
  throw Error(ErrorKind::kInvalid, std::string(operation) + ": " + std::to_string(outputs) +
                                       " outputs for " + std::to_string(inputs) +
                                       " inputs; they go in pairs, at least one");
}

void check_same_count_self(const std::vector<communicator::Source>& sources,
                           const std::vector<communicator::Sink>& sinks, int rank,
                           const char* operation) {
  const size_t sent = sources[static_cast<size_t>(rank)].count;
  const size_t taken = sinks[static_cast<size_t>(rank)].count;
  if (sent == taken) return;
  throw Error(ErrorKind::kInvalid, std::string(operation) + ": rank " + std::to_string(rank) +
                                       " gives itself " + std::to_string(sent) +
                                       " elements and expects " + std::to_string(taken));
}

}  // namespace hbm::process_group
