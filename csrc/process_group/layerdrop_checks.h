// Checks of what layerdrop.h is given. Each throws Error(kInvalid) that names the argument, what
// was found and what is needed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"

namespace hbm::layerdrop {

// REQUIRES: a tensor that was checked.
Dtype type_of(const at::Tensor& tensor);

// Whether the memory of two flat tensors overlaps.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

void check_accumulate(const std::vector<at::Tensor>& gradients,
                      const std::vector<std::optional<at::Tensor>>& before,
                      const std::vector<at::Tensor>& after);

void check_pack(const std::vector<at::Tensor>& caches, const at::Tensor& wire);

void check_unpack(const at::Tensor& wire, const at::Tensor& buffer,
                  const std::vector<int64_t>& begins, const std::vector<int64_t>& counts);

void check_threshold(const std::vector<double>& representatives, const std::vector<int64_t>& sizes,
                     double ratio);

}  // namespace hbm::layerdrop
