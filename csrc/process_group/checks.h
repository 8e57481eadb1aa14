// Checks of arguments, before anything is sent. Each check throws Error(kInvalid) that names the
// argument and the value found.
//
// Threads: pure functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "communicator/communicator.h"

namespace hbm::process_group {

// Requires `tensor` to be on the CPU or an accelerator. `argument` is its name in the error.
void check_device(const at::Tensor& tensor, const char* argument);

// Requires `tensor` to be dense, and on the CPU or an accelerator. `argument` is its name in the
// error.
void check_tensor(const at::Tensor& tensor, const char* argument);

// Calls check_tensor() for each tensor. Requires that all have one type and are on one device.
void check_tensors(const std::vector<at::Tensor>& tensors, const char* argument);

// Requires exactly one tensor in the list, calls check_tensor() for it, and returns it.
const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* argument);

// Requires that no two elements of `tensor`, an output, share memory.
void check_writable(const at::Tensor& tensor);

// Calls check_writable() for each tensor. Requires that no two tensors share memory, strided
// tensors included.
void check_outputs(const std::vector<at::Tensor>& tensors, const char* argument);

// Requires that no two contiguous tensors share memory. Does not check other tensors: the operation
// uses contiguous copies of them.
void check_disjoint(const std::vector<at::Tensor>& tensors, const char* argument);

// Requires one type and one device for the input and the output.
void check_same_type(const at::Tensor& input, const at::Tensor& output, const char* operation);

// Requires equal numbers of elements.
void check_same_count(const at::Tensor& a, const at::Tensor& b, const char* name_of_a,
                      const char* name_of_b);

// Requires `whole` to have `ranks` times the elements of `part`.
void check_parts(const at::Tensor& whole, const at::Tensor& part, int ranks,
                 const char* name_of_whole, const char* name_of_part);

// Requires `part` either to be rank `own`'s part of `whole`, or to share no memory with `whole`.
void check_own_part(int own, const at::Tensor& whole, const at::Tensor& part,
                    const char* operation);

// Throws if a contiguous input and a contiguous output overlap. Only the input and the output of
// rank `own` may be the same memory. If `own` is -1, no input may be the memory of an output.
void check_apart(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                 int own, const char* operation);

// Requires as many inputs as outputs, and at least one.
void check_pairs(size_t outputs, size_t inputs, const char* operation);

// Requires that this rank sends itself as many elements as it receives from itself.
void check_same_count_self(const std::vector<communicator::Source>& sources,
                           const std::vector<communicator::Sink>& sinks, int rank,
                           const char* operation);

}  // namespace hbm::process_group
