// The copies that one operation makes between tensors on an accelerator and their twins on the
// host, where the communicator works.
//
//   issue          an event of the caller's current stream: all that the copies wait for
//   to the host    on a stream of the group's own, after that event
//   operation      on the twins, once the copies have arrived (process_group/device_operation.h)
//   to the device  on another stream of the group's, with an event behind the last copy
//   wait()         makes the caller's current stream wait for that event
//
// A large collective is cut into chunks (process_group/chunks.h), each with its copies, its
// operation and its events. All copies to the host are queued at once; those of a chunk to the
// device when its operation is done, so that the bus carries both directions while the ranks
// reduce. A tensor with gaps is copied whole, with the first chunk, and back with the last.
//
// A sparse tensor's copies are known when its operation begins and ends
// (process_group/sparse_twin.h), so they are made then, in one chunk.
//
// The host never waits for the device in any of it. Memory: the device's allocator is told of the
// streams that use a tensor's memory; a twin is kept until no copy can read or write it, however
// the operation ended.
//
// Threads: a transfer is made by the issuing thread, and used by it or by the one that drives the
// operation, one at a time. A result may be used by any.
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

namespace hbm {

// Copies; the first of each pair is what is written.
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;
using MakeCopies = std::function<Copies()>;

// The results that an operation leaves on the device.
class DeviceResult {
 public:
  // `stream` is the one that the copies to the device will be queued on.
  DeviceResult(c10::Stream stream, const Copies& to_device);

  c10::Stream stream() const noexcept { return stream_; }
  c10::Device device() const noexcept { return stream_.device(); }

  // Makes the calling thread's current stream wait for it, and keeps memory that the operation
  // allocated until that stream is done with it. REQUIRES: the operation is done.
  void block_current_stream() const;

  // The same for an operation that has failed, whose first chunks may be on their way.
  void block_after_error() const noexcept;

  // True when the device has what was copied to it, or is lost. False while the operation goes on.
  bool finished() const;

  // True if it lies in memory that one of `copies` reads.
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
  std::optional<c10::Event> event_;  // behind the copies to the device; none: there are none
  std::vector<at::Tensor> allocated_;
  std::atomic<bool> ended_{false};  // release in end(), after event_; acquire in finished()
};

class DeviceTransfer {
 public:
  // Changes chunk `index` of the twins on the host; may be empty.
  using Prepare = std::function<void(const Chunks& chunks, size_t index)>;

  // `to_host` are copies into twins, `to_device` copies of them; `prepare` is called for each chunk
  // when it has arrived.
  DeviceTransfer(std::shared_ptr<DeviceStreams> streams, Copies to_host, Copies to_device,
                 Prepare prepare, Chunks chunks);
  // Asks for the copies to the host when the operation begins, and for those to the device, into
  // tensors that were allocated for them on that stream, when it is done.
  DeviceTransfer(std::shared_ptr<DeviceStreams> streams, MakeCopies to_host, MakeCopies to_device);
  ~DeviceTransfer() { let_go(); }

  // Frees the twins of earlier transfers that no copy uses any more: before new ones are taken.
  static void free_left();

  DeviceTransfer(const DeviceTransfer&) = delete;
  DeviceTransfer& operator=(const DeviceTransfer&) = delete;

  const DeviceStreams& streams() const noexcept { return *streams_; }
  const std::shared_ptr<DeviceResult>& result() const noexcept { return result_; }

  const Chunks& chunks() const noexcept { return chunks_; }

  // Takes its place among the collectives of the group, in the order of issue. The copies to the
  // host start now, unless they are not known yet or an earlier collective is yet to write what
  // they read.
  void issue();

  // Queues the copies to the host, behind the results that the group has queued so far; does
  // nothing if they have started.
  void start_to_host();

  // True when the twins hold the input of chunk `index`. Throws what the device had to say, also at
  // issue(), so that an error is the operation's, and reaches the other ranks. REQUIRES:
  // start_to_host() was called.
  bool arrived(size_t index) const;

  // Calls what prepares the twins. REQUIRES: arrived(index).
  void prepare(size_t index) const;

  // Queues the copies of chunk `index` to the device; after the last, lets the tensors and the
  // twins go. REQUIRES: every chunk in turn.
  void start_to_device(size_t index);

  // False: the operation has no input on the device.
  bool reads() const noexcept { return reads_; }

 private:
  void copy_to_host();
  void let_go() noexcept;

  const std::shared_ptr<DeviceStreams> streams_;
  const std::shared_ptr<DeviceResult> result_;
  const bool reads_;
  const Prepare prepare_;
  const Chunks chunks_;
  const c10::Event issued_;        // of the caller's stream
  const MakeCopies make_to_host_;  // null: known from the start
  const MakeCopies make_to_device_;
  Copies to_host_;
  Copies to_device_;
  bool started_ = false;               // the copies to the host
  std::vector<c10::Event> arriving_;   // behind the copies of each chunk to the host
  std::optional<c10::Event> leaving_;  // behind those to the device
  std::exception_ptr failed_;          // of the copies at issue
  bool in_doubt_ = false;              // copies were queued, and no event stands behind them
};

}  // namespace hbm
