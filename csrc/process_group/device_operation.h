// An operation on tensors of an accelerator: one of the communicator's on the host for each chunk,
// between the copies to the host and those back. To the queue, to errors and to the flight record
// it is one.
//
// Threads: as Operation. SendOrder: any.
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

namespace hbm {

// The sends of a group whose input is still on its way to the host, in the order of issue. Messages
// of one rank to another with one tag are matched in the order in which they are sent, so one whose
// input is there waits for those before it.
class SendOrder {
 public:
  // A send's position in it, from now until it is let go or destroyed.
  class Position {
   public:
    Position() = default;
    explicit Position(std::shared_ptr<SendOrder> order);
    Position(Position&&) noexcept = default;
    Position& operator=(Position&&) = delete;
    ~Position() { let_go(); }

    bool is_first() const;
    void let_go() noexcept;

   private:
    std::shared_ptr<SendOrder> order_;  // null: let go
    uint64_t number_ = 0;
  };

  bool empty() const;

 private:
  mutable std::mutex mutex_;  // guards the two below
  std::deque<uint64_t> waiting_;
  uint64_t issued_ = 0;
};

class DeviceOperation final : public Operation {
 public:
  // Makes a chunk's operation, when the one before is done.
  using MakeChunk = std::function<OperationPtr(size_t index)>;

  // A message. `transfer` is null for one without tensors on a device, a send that waits for those
  // before it. `position` is that of a send, else default-made.
  DeviceOperation(OperationPtr operation, std::shared_ptr<DeviceTransfer> transfer,
                  SendOrder::Position position);
  // A collective. Throws what make(0) throws.
  DeviceOperation(MakeChunk make, std::shared_ptr<DeviceTransfer> transfer);

  void begin() override;
  Progress poll() override;
  std::string describe() const override;
  std::vector<int> missing() const override;
  std::vector<int> needed() const override;
  Slept sleep(std::chrono::steady_clock::time_point until, bool polled) override {
    return begun_ ? operation_->sleep(until, polled) : Slept::kNoWakeup;
  }
  void abandon() noexcept override;
  bool peers_may_write() const override { return begun_ && operation_->peers_may_write(); }
  bool self_sufficient() const override;

 private:
  // Begins the chunk's operation on the host if its input is there and all sends before it have
  // begun.
  bool begin_on_host();

  const MakeChunk make_;
  OperationPtr operation_;  // of the chunk; null: it could not be made
  std::string described_;   // of the chunk before
  const std::shared_ptr<DeviceTransfer> transfer_;
  SendOrder::Position position_;
  size_t chunk_ = 0;
  bool begun_ = false;  // the chunk's operation
};

}  // namespace hbm
