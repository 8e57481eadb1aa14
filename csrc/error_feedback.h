// The passes of error feedback over the tensors of a bucket.
//
// A parameter's gradients are accumulated in its residual, a flat tensor. Some residuals are packed
// into the wire, the tensor that is sent. The average of the ranks' wires is unpacked to the
// gradients. Tensors are flat: of one dimension, contiguous and in the memory of the CPU. Gradients
// and residuals are float32, bfloat16 or float16, or all float64.
//
// Elements are computed, rounded and measured as in kernels/error_feedback_passes.h. A residual is
// measured in parts of kPartElements elements, whose sums are added in order. So the result is the
// same for every number of threads and on every processor.
//
// Threads: any thread may call the functions. PyTorch's intra-op threads share the work. REQUIRES:
// no other call uses memory that a call writes. Errors: Error(kInvalid) for unsuitable tensors,
// before any tensor is changed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace hbm::error_feedback {

inline constexpr int64_t kPartElements = 32768;  // elements per step of a thread

// after[i] = before[i] + factor * gradients[i]; an absent `before` is zeros. after[i] may be
// before[i] or gradients[i]; otherwise it shares memory with neither. Returns float64 [n, 2]. Row i
// has two sums. The first is the sum of |after[i]|, or of the squares of after[i] if `squares`. The
// second is the sum of |gradients[i]|. The second is 0 only if all elements of gradients[i] are 0.
// A NaN or an infinity among the elements makes a sum NaN or infinite.
at::Tensor accumulate(const std::vector<at::Tensor>& gradients,
                      const std::vector<std::optional<at::Tensor>>& before,
                      const std::vector<at::Tensor>& after, double factor, bool squares);

// Packs the residuals, one after the other, into the wire, which has as many elements as all
// residuals: wire = factor * residual. If the wire's type has fewer bytes than the residual's type,
// the residual then becomes the rounding error, residual - inverse * wire. An element of the
// residual becomes 0 if its element of the wire is infinite or NaN. If the wire's type has as many
// bytes or more, the residual does not change.
void pack(const std::vector<at::Tensor>& residuals, const at::Tensor& wire, double factor,
          double inverse);

// Converts consecutive parts of `wire`, which together are all of `wire`, to buffer[begins[i] :
// begins[i] + counts[i]]. These ranges of `buffer` are disjoint and in ascending order. All other
// elements of `buffer` become 0. Returns true if all elements of `wire` are finite. `wire` may
// begin at the start of `buffer` if an element of `wire` has no more bytes than an element of
// `buffer`. Then the parts of `wire` move only towards the end of `buffer`.
bool unpack(const at::Tensor& wire, const at::Tensor& buffer, const std::vector<int64_t>& begins,
            const std::vector<int64_t>& counts);

}  // namespace hbm::error_feedback
