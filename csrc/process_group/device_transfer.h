// The copies of one operation between tensors on an accelerator and their host copies, on which the
// communicator works.
//
//   issue          an event of the caller's current stream, for which all copies wait
//   to the host    on a stream of the group, after that event
//   operation      on the host copies, once they have arrived (process_group/device_operation.h)
//   to the device  on another stream of the group, with an event after the last copy
//   wait()         makes the caller's current stream wait for that event
//
// A large collective is cut into chunks (process_group/chunks.h), each with its copies, its
// operation and its events. All copies to the host are queued together. The copies of a chunk to
// the device are queued when the chunk's operation is done, so the bus carries both directions
// while the ranks reduce. A tensor with gaps is copied whole: to the host with the first chunk, to
// the device with the last.
//
// The sizes of a sparse tensor are known only when the operation begins, and the sizes of the sum
// only when the operation is done (process_group/sparse_host_copy.h). So the copies to the host are
// queued when the operation begins, not at issue, and the copies to the device when the operation
// is done. There is one chunk.
//
// The host never waits for the device. The device's allocator is notified of the streams that use a
// tensor's memory. A host copy is kept until no copy can read or write it, however the operation
// ended.
//
// Threads: a transfer is made by the issuing thread, and used by this thread or the progress
// thread, one at a time. A result may be used by any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "process_group/chunks.h"
#include "process_group/device_streams.h"

namespace hbm::process_group {

// Pairs of tensors: destination, source.
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;
using MakeCopies = std::function<Copies()>;

// The results that an operation leaves on the device.
class DeviceResult {
 public:
  // `stream` is the stream of the copies to the device.
  DeviceResult(c10::Stream stream, const Copies& to_device);

  c10::Stream stream() const noexcept { return stream_; }
  c10::Device device() const noexcept { return stream_.device(); }

  // Makes the calling thread's current stream wait for the results. Keeps memory that the operation
  // allocated until that stream is done with it. REQUIRES: the operation is done.
  void block_current_stream() const;

  // Does the same as block_current_stream() for a failed operation, whose first chunks may still be
  // on their way to the device. Ignores the errors of a lost device.
  void block_after_error() const noexcept;

  // Returns true once the operation has ended, and either its copies to the device are complete or
  // the device is lost.
  bool finished() const;

  // Returns true if one of `copies` reads memory of the results.
  bool is_read_by(const Copies& copies) const;

 private:
  friend class DeviceTransfer;
  struct AddressRange {
    uintptr_t begin;
    uintptr_t end;
  };
  static AddressRange memory_of(const at::Tensor& tensor);
  void end() noexcept { ended_.store(true, std::memory_order_release); }

  const c10::Stream stream_;
  std::vector<AddressRange> written_;
  std::optional<c10::Event> event_;  // after the copies to the device; empty: none are queued
  std::vector<at::Tensor> allocated_;
  std::atomic<bool> ended_{false};  // release in end(), after event_; acquire in finished()
};

class DeviceTransfer {
 public:
  // A function that changes chunk `index` of the host copies; an empty one changes nothing.
  using Prepare = std::function<void(const Chunks& chunks, size_t index)>;

  // `to_host` are the copies from device tensors to host copies, `to_device` the copies back. Calls
  // `prepare` for each chunk that has arrived.
  DeviceTransfer(std::shared_ptr<DeviceStreams> streams, Copies to_host, Copies to_device,
                 Prepare prepare, Chunks chunks);
  // For copies whose sizes are not known at issue: calls `to_host` when the operation begins, and
  // `to_device` when the operation is done. The copies of `to_device` write to tensors that were
  // allocated on the stream of the copies to the device.
  DeviceTransfer(std::shared_ptr<DeviceStreams> streams, MakeCopies to_host, MakeCopies to_device);
  ~DeviceTransfer() { release(); }

  // Frees the host copies of earlier transfers that no copy uses any longer. Called before new host
  // copies are allocated.
  static void free_unused();

  DeviceTransfer(const DeviceTransfer&) = delete;
  DeviceTransfer& operator=(const DeviceTransfer&) = delete;

  const DeviceStreams& streams() const noexcept { return *streams_; }
  const std::shared_ptr<DeviceResult>& result() const noexcept { return result_; }

  const Chunks& chunks() const noexcept { return chunks_; }

  // Starts the copies to the host now, except in two cases. The sizes of the copies may depend on
  // the tensor's contents. Or the copies may read memory that an earlier collective has still to
  // write. In both cases start_to_host() starts the copies. REQUIRES: collectives call it in the
  // order of issue.
  void issue();

  // Queues the copies to the host, after the results that the group has queued so far. Does
  // nothing if the copies have started.
  void start_to_host();

  // Returns true when the input of chunk `index` has arrived in the host copies. Throws the
  // device's errors, also errors during issue(), so that they become the operation's errors, and
  // reach the other ranks. REQUIRES: start_to_host() was called.
  bool arrived(size_t index) const;

  // Calls `prepare` for a chunk. REQUIRES: arrived(index).
  void prepare(size_t index) const;

  // Queues the copies of chunk `index` to the device. After the last chunk, releases the tensors
  // and the host copies. REQUIRES: called for every chunk, in order.
  void start_to_device(size_t index);

  // Returns false if the operation has no input on the device.
  bool reads() const noexcept { return reads_; }

 private:
  void copy_to_host();
  void release() noexcept;

  const std::shared_ptr<DeviceStreams> streams_;
  const std::shared_ptr<DeviceResult> result_;
  const bool reads_;
  const Prepare prepare_;
  const Chunks chunks_;
  const c10::Event issued_;        // an event of the caller's stream
  const MakeCopies make_to_host_;  // null: the copies are known from the start
  const MakeCopies make_to_device_;
  Copies to_host_;
  Copies to_device_;
  bool started_ = false;               // the copies to the host have started
  std::vector<c10::Event> arriving_;   // after the copies of each chunk to the host
  std::optional<c10::Event> leaving_;  // after the copies to the device
  std::exception_ptr failed_;          // the error of the copies at issue
  bool in_doubt_ = false;              // some queued copies may have no event after them
};

}  // namespace hbm::process_group
