#include "process_group/device_operation.h"

#include <algorithm>
#include <utility>

#include "memory/staging.h"

namespace hbm::process_group {

SendOrder::Position::Position(std::shared_ptr<SendOrder> order) : order_(std::move(order)) {
  const std::lock_guard lock(order_->mutex_);
  number_ = ++order_->issued_;
  order_->waiting_.push_back(number_);
}

bool SendOrder::Position::is_first() const {
  if (!order_) return true;
  const std::lock_guard lock(order_->mutex_);
  return order_->waiting_.front() == number_;
}

void SendOrder::Position::release() noexcept {
  if (!order_) return;
  {
    const std::lock_guard lock(order_->mutex_);
    std::erase(order_->waiting_, number_);
  }
  order_.reset();
}

bool SendOrder::empty() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty();
}

DeviceOperation::DeviceOperation(communicator::OperationPtr operation,
                                 std::shared_ptr<DeviceTransfer> transfer,
                                 SendOrder::Position position)
    : operation_(std::move(operation)),
      transfer_(std::move(transfer)),
      position_(std::move(position)) {}

DeviceOperation::DeviceOperation(MakeChunk make, std::shared_ptr<DeviceTransfer> transfer)
    : make_(std::move(make)), operation_(make_(0)), transfer_(std::move(transfer)) {}

void DeviceOperation::begin() {
  if (transfer_) transfer_->start_to_host();
  begin_on_host();
}

bool DeviceOperation::begin_on_host() {
  if ((transfer_ && !transfer_->arrived(chunk_)) || !position_.is_first()) return false;
  if (transfer_) transfer_->prepare(chunk_);
  begun_ = true;
  operation_->begin();
  position_.release();
  return true;
}

progress::Progress DeviceOperation::poll() {
  if (!begun_ && !begin_on_host()) return progress::Progress::kIdle;
  const progress::Progress progress = operation_->poll();
  if (progress != progress::Progress::kDone) return progress;
  observed_.add(operation_->observed(), chunk_ == 0);
  if (!transfer_) return progress;
  transfer_->start_to_device(chunk_);
  if (++chunk_ == transfer_->chunks().number()) return progress::Progress::kDone;
  begun_ = false;
  described_ = operation_->describe();
  const memory::StagingHold held;  // gives the memory of this chunk to the next one
  operation_.reset();
  operation_ = make_(chunk_);
  return progress::Progress::kActive;
}

std::string DeviceOperation::describe() const {
  const std::string text = operation_ ? operation_->describe() : described_;
  if (begun_ || !transfer_) return text;
  const size_t chunks = transfer_->chunks().number();
  const std::string input =
      chunks == 1 ? "input"
                  : "chunk " + std::to_string(chunk_ + 1) + " of " + std::to_string(chunks);
  return text + ", whose " + input + " has not come from " + transfer_->streams().device().str() +
         " yet,";
}

std::vector<int> DeviceOperation::missing() const {
  return begun_ ? operation_->missing() : std::vector<int>();
}

std::vector<int> DeviceOperation::needed() const {
  return begun_ ? operation_->needed() : std::vector<int>();
}

void DeviceOperation::abandon() noexcept {
  position_.release();
  if (begun_) operation_->abandon();
}

bool DeviceOperation::self_sufficient() const {
  const bool waits = (transfer_ && transfer_->reads()) || !position_.is_first();
  const bool more = transfer_ && transfer_->chunks().number() > 1;
  return !waits && !more && operation_->self_sufficient();
}

}  // namespace hbm::process_group
