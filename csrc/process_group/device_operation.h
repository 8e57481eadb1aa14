// An operation on tensors of an accelerator. It runs an operation of the communicator on the host
// for each chunk, between the copies to the host and the copies back. For the queue, in errors and
// in the flight record, it is a single operation.
//
// Threads: as Operation. SendOrder: any thread.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "process_group/device_transfer.h"
#include "progress/operation.h"

namespace hbm::process_group {

// The sends of a group that wait to begin, in the order of issue: a send whose input is on a
// device, and the sends after it. The receiver matches the messages from one rank with one tag in
// the order of sending. So a send whose input is on the host waits until all earlier sends have
// begun.
class SendOrder {
 public:
  // A send's position in the order, from its construction until release() or destruction.
  class Position {
   public:
    Position() = default;
    explicit Position(std::shared_ptr<SendOrder> order);
    Position(Position&&) noexcept = default;
    Position& operator=(Position&&) = delete;
    ~Position() { release(); }

    bool is_first() const;
    void release() noexcept;

   private:
    std::shared_ptr<SendOrder> order_;  // null: released
    uint64_t number_ = 0;
  };

  bool empty() const;

 private:
  mutable std::mutex mutex_;  // guards the members below
  std::deque<uint64_t> waiting_;
  uint64_t issued_ = 0;
};

class DeviceOperation final : public progress::Operation {
 public:
  // Makes the operation of chunk `index`. Called by the constructor for the first chunk, and for
  // each further chunk when the operation of the previous one is done.
  using MakeChunk = std::function<communicator::OperationPtr(size_t index)>;

  // Makes a message. `transfer` is null for a send from host memory, which only waits for earlier
  // sends. `position` is the position of a send. It is default-constructed for a receive.
  DeviceOperation(communicator::OperationPtr operation, std::shared_ptr<DeviceTransfer> transfer,
                  SendOrder::Position position);
  // Makes a collective. Throws the exceptions of make(0).
  DeviceOperation(MakeChunk make, std::shared_ptr<DeviceTransfer> transfer);

  void begin() override;
  progress::Progress poll() override;
  std::string describe() const override;
  std::vector<int> missing() const override;
  std::vector<int> needed() const override;
  progress::Slept sleep(std::chrono::steady_clock::time_point until, bool polled) override {
    return begun_ ? operation_->sleep(until, polled) : progress::Slept::kNoWakeup;
  }
  void abandon() noexcept override;
  bool peers_may_write() const override { return begun_ && operation_->peers_may_write(); }
  bool self_sufficient() const override;

 private:
  // Begins the chunk's operation on the host if its input has arrived and all earlier sends have
  // begun.
  bool begin_on_host();

  const MakeChunk make_;
  communicator::OperationPtr operation_;  // of the current chunk; null: make_() threw
  std::string described_;                 // describe() of the previous chunk's operation
  const std::shared_ptr<DeviceTransfer> transfer_;
  SendOrder::Position position_;
  size_t chunk_ = 0;
  bool begun_ = false;  // the current chunk's operation has begun
};

}  // namespace hbm::process_group
