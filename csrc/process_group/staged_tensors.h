// The tensors of one operation, as contiguous buffers for the communicator.
//
// A contiguous tensor on the host is used in place, unless it is lazily conjugated or negated. Any
// other tensor gets a contiguous copy, filled just before the operation begins and copied back when
// it is complete. So operations issued one after the other on the same strided tensor see each
// other's results. A tensor on an accelerator has its copy on the host;
// process_group/device_transfer.h fills it and copies it back.
//
// Threads: the issuing thread builds the object; the hooks run on the progress thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "process_group/device_streams.h"
#include "process_group/device_transfer.h"
#include "process_group/sparse_host_copy.h"
#include "progress/operation_queue.h"

namespace hbm::process_group {

class StagedTensors {
 public:
  // `streams` are the streams of the device of all tensors of the operation; null if the tensors
  // are on the host.
  explicit StagedTensors(std::shared_ptr<DeviceStreams> streams = nullptr)
      : streams_(std::move(streams)) {}

  // Returns true if the tensor is used in place.
  static bool usable(const at::Tensor& tensor);

  communicator::Source input(const at::Tensor& tensor);
  communicator::Sink output(const at::Tensor& tensor);
  communicator::Sink in_place(const at::Tensor& tensor);
  std::vector<communicator::Source> inputs(const std::vector<at::Tensor>& tensors);
  std::vector<communicator::Sink> outputs(const std::vector<at::Tensor>& tensors);

  // Returns one buffer with copies of all `tensors`, one after the other. Every element is
  // multiplied by `factor`. The results are copied back to the tensors. REQUIRES: the tensors have
  // one type.
  communicator::Sink packed(const std::vector<at::Tensor>& tensors, double factor);

  // Do the same as input() and in_place(), but multiply every element by `factor` before the
  // operation begins. input_times() does not change the tensor itself.
  communicator::Source input_times(const at::Tensor& tensor, double factor);
  communicator::Sink in_place_times(const at::Tensor& tensor, double factor);

  // Returns the host copy of a sparse tensor, the operation's only tensor, on a device; null for a
  // tensor on the host.
  std::shared_ptr<SparseHostCopy> sparse(const at::Tensor& tensor);

  // Returns the transfer that makes the copies between the device and the host copies; null for
  // tensors on the host. Called once, before take_hooks(), whose hooks then omit these copies.
  // REQUIRES: each tensor holds whole streams, if `streams` are equally long.
  std::shared_ptr<DeviceTransfer> take_transfer(const EqualStreams& streams);

  // Returns hooks that make the copies and keep all tensors alive until the operation is done.
  // `at_end` runs after the results are in place. Called once.
  progress::StagingHooks take_hooks(std::function<void()> at_end);

 private:
  struct Scaling {
    at::Tensor tensor;
    double factor;
  };

  const at::Tensor& keep(at::Tensor tensor);
  const at::Tensor& keep_host_copy(const at::Tensor& tensor);
  DeviceTransfer::Prepare take_scalings();

  std::shared_ptr<DeviceStreams> streams_;  // null: the tensors are on the host
  std::vector<at::Tensor> kept_;
  Copies copies_in_;
  Copies copies_out_;
  std::vector<Scaling> scalings_;
  std::shared_ptr<SparseHostCopy> sparse_;
};

// Returns the streams of `parts`, one for each rank. The streams may be cut into chunks if all
// parts are as long as `own`.
EqualStreams equal_streams(const std::vector<at::Tensor>& parts, const at::Tensor& own);

const void* offset(const void* data, size_t bytes);
void* offset(void* data, size_t bytes);

// Returns `ranks` parts of equal length. `element` is the number of bytes of an element.
template <typename Part>
std::vector<Part> split_evenly(const Part& whole, int ranks, size_t element) {
  const size_t count = whole.count / static_cast<size_t>(ranks);
  std::vector<Part> parts;
  for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) {
    parts.push_back({offset(whole.data, r * count * element), count});
  }
  return parts;
}

}  // namespace hbm::process_group
