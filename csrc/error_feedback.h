// The passes of error feedback over the tensors of a bucket.
//
// A parameter's gradients are accumulated in its residual, a flat tensor. Some residuals are packed
// into one wire, whose averages come back to the gradients. Tensors are flat: of one dimension,
// contiguous and in the memory of the CPU. Gradients and residuals are float32, bfloat16 or
// float16, or all float64.
//
// Elements are computed, rounded and measured as kernels/error_feedback_passes.h has it. A residual
// is measured in pieces of kPiece elements whose moments are added in order, so the result is the
// same for every number of threads and on every processor.
//
// Threads: callable from any; the work is shared by PyTorch's intra-op threads. No two calls at a
// time on memory that one of them writes.
// Errors: Error(kInvalid) for tensors that do not fit, which changes none of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace hbm::error_feedback {

inline constexpr int64_t kPiece = 32768;  // elements that one thread takes at a time

// after[i] = before[i] + factor * gradients[i], with zeros for a `before` that is absent; after[i]
// may be before[i] or gradients[i], and shares no memory with either otherwise.
// Returns float64 [n, 2]: the sum of |after[i]| (or of its squares), and the sum of |gradients[i]|,
// which is 0 if all of it is. A NaN or an infinity is one in the sum.
at::Tensor accumulate(const std::vector<at::Tensor>& gradients,
                      const std::vector<std::optional<at::Tensor>>& before,
                      const std::vector<at::Tensor>& after, double factor, bool squares);

// One after the other into wire, which has as many elements as all together: wire = factor *
// residual. If the wire's type has fewer bytes than the residual's, the residual keeps the rounding
// error, residual - inverse * wire (0 where the wire is infinite or NaN); else it is not changed.
void pack(const std::vector<at::Tensor>& residuals, const at::Tensor& wire, double factor,
          double inverse);

// The parts of wire, in their order, become buffer[begins[i] : begins[i] + counts[i]], converted;
// all else of buffer becomes 0. The parts are in ascending order and disjoint, and together all of
// wire. Returns whether all of wire is finite.
// wire may begin where buffer does, if its type has no more bytes: parts move towards the end only.
bool unpack(const at::Tensor& wire, const at::Tensor& buffer, const std::vector<int64_t>& begins,
            const std::vector<int64_t>& counts);

}  // namespace hbm::error_feedback
