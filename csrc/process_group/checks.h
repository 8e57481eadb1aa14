// Checks of arguments, before anything is sent. Each throws Error(kInvalid) naming what was asked
// and what was found.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "communicator/communicator.h"

namespace hbm {

// `tensor` is on the CPU or an accelerator; `argument` names it.
void check_device(const at::Tensor& tensor, const char* argument);

// `tensor` is dense, on the CPU or an accelerator; `argument` names it.
void check_tensor(const at::Tensor& tensor, const char* argument);

// All are so, of one type, and on one device.
void check_tensors(const std::vector<at::Tensor>& tensors, const char* argument);

// The only tensor of a list that must have one.
const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* argument);

// No two elements of `tensor`, to which results are written, share memory.
void check_writable(const at::Tensor& tensor);

// As check_writable() for each tensor. No two of the tensors share memory, strided ones included.
void check_outputs(const std::vector<at::Tensor>& tensors, const char* argument);

// No two of the contiguous tensors share memory.
void check_disjoint(const std::vector<at::Tensor>& tensors, const char* argument);

// The input and the output have one type, and are on one device.
void check_same_type(const at::Tensor& input, const at::Tensor& output, const char* operation);

void check_same_count(const at::Tensor& a, const at::Tensor& b, const char* name_of_a,
                      const char* name_of_b);

// `whole` has `ranks` times the elements of `part`.
void check_parts(const at::Tensor& whole, const at::Tensor& part, int ranks,
                 const char* name_of_whole, const char* name_of_part);

// `part` may be rank `own`'s part of `whole`, or lie elsewhere; not in between.
void check_own_part(int own, const at::Tensor& whole, const at::Tensor& part,
                    const char* operation);

// No tensor of `inputs` shares memory with one of `outputs`, but for rank `own`'s, which may be one
// and the same (own: -1 for none).
void check_apart(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                 int own, const char* operation);

// A list of inputs and one of outputs belong together.
void check_pairs(size_t outputs, size_t inputs, const char* operation);

// The elements that this rank sends itself are as many as it takes from itself.
void check_same_count_self(const std::vector<Source>& sources, const std::vector<Sink>& sinks,
                           int rank, const char* operation);

}  // namespace hbm
