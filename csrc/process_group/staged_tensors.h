// The tensors of one operation as the contiguous buffers that the collectives want.
//
// A tensor that is contiguous is used where it lies. Any other gets a contiguous twin, filled just
// before the operation begins and copied back when it is complete, so that operations issued one
// after the other on the same strided tensor see each other's results.
//
// Threads: built by the issuing thread; the frame runs on the driving thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "progress/operation_queue.h"

namespace hbm {

class StagedTensors {
 public:
  // Whether a tensor is used where it lies.
  static bool usable(const at::Tensor& tensor);

  Source input(const at::Tensor& tensor);
  Sink output(const at::Tensor& tensor);
  Sink in_place(const at::Tensor& tensor);
  std::vector<Source> inputs(const std::vector<at::Tensor>& tensors);
  std::vector<Sink> outputs(const std::vector<at::Tensor>& tensors);

  // All `tensors` (of one type), one after the other, as in_place().
  Sink packed(const std::vector<at::Tensor>& tensors, double factor);

  // Same as input() and in_place(), with every element multiplied by `factor` before the operation
  // begins. input_times() leaves the tensor itself as it is.
  Source input_times(const at::Tensor& tensor, double factor);
  Sink in_place_times(const at::Tensor& tensor, double factor);

  // Keeps all tensors alive until the operation is done. `at_end` runs after the results are in
  // place. Call once.
  Frame take_frame(std::function<void()> at_end);

 private:
  struct Scaling {
    at::Tensor tensor;
    double factor;
  };

  const at::Tensor& keep(at::Tensor tensor);

  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_in_;   // to, from
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_out_;  // to, from
  std::vector<Scaling> scalings_;
};

const void* offset(const void* data, size_t bytes);
void* offset(void* data, size_t bytes);

// `ranks` parts of equal length.
template <typename Part>
std::vector<Part> split_evenly(const Part& whole, int ranks, size_t element) {
  const size_t count = whole.count / static_cast<size_t>(ranks);
  std::vector<Part> parts;
  for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) {
    parts.push_back({offset(whole.data, r * count * element), count});
  }
  return parts;
}

}  // namespace hbm
