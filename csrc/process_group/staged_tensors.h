// The tensors of one operation as the contiguous buffers that the collectives want.
//
// A tensor that is contiguous is used where it lies. Any other gets a contiguous twin, filled just
// before the operation begins and copied back when it is complete, so that operations issued one
// after the other on the same strided tensor see each other's results. A tensor on an accelerator
// has its twin on the host (process_group/device_transfer.h copies).
//
// Threads: built by the issuing thread; the frame runs on the driving thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "process_group/device_streams.h"
#include "process_group/device_transfer.h"
#include "process_group/sparse_twin.h"
#include "progress/operation_queue.h"

namespace hbm {

class StagedTensors {
 public:
  // `streams` are those of the device that all tensors of the operation lie on; null: the host.
  explicit StagedTensors(std::shared_ptr<DeviceStreams> streams = nullptr)
      : streams_(std::move(streams)) {}

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

  // Returns the twin of a sparse tensor, the operation's only one, on a device; null for one on the
  // host.
  std::shared_ptr<SparseTwin> sparse(const at::Tensor& tensor);

  // Makes the copies between the device and the twins; null for tensors on the host. Called once,
  // before take_frame(), which then leaves them out. REQUIRES: each tensor holds whole `streams` if
  // these are equal.
  std::shared_ptr<DeviceTransfer> take_transfer(const EqualStreams& streams);

  // Keeps all tensors alive until the operation is done. `at_end` runs after the results are in
  // place. Call once.
  Frame take_frame(std::function<void()> at_end);

 private:
  struct Scaling {
    at::Tensor tensor;
    double factor;
  };

  const at::Tensor& keep(at::Tensor tensor);
  const at::Tensor& keep_twin(const at::Tensor& tensor);
  DeviceTransfer::Prepare take_scalings();

  std::shared_ptr<DeviceStreams> streams_;  // null: the tensors are on the host
  std::vector<at::Tensor> kept_;
  Copies copies_in_;
  Copies copies_out_;
  std::vector<Scaling> scalings_;
  std::shared_ptr<SparseTwin> sparse_;
};

// Returns the streams of `parts`, one for each rank, which may be cut if all are as long as `own`.
EqualStreams equal_streams(const std::vector<at::Tensor>& parts, const at::Tensor& own);

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
