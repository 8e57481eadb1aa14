#include "process_group/device_transfer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <iterator>
#include <mutex>

namespace hbm::process_group {
namespace {

void queue_one(const at::Tensor& to, const at::Tensor& from) {
  // Resolves lazy conjugation and negation on the device. The copy would resolve them on the host
  // immediately, before the bytes have arrived.
  to.copy_(from.resolve_conj().resolve_neg(), /*non_blocking=*/true);
}

// Queues the copies of chunk `index`. Tensors with gaps are copied whole, with chunk `with_gaps`.
// Autograd and inference mode do not affect the copies.
void queue(const Copies& copies, const c10::Stream& stream, const Chunks& chunks, size_t index,
           size_t with_gaps) {
  const c10::StreamGuard guard(stream);
  const at::AutoDispatchBelowADInplaceOrView plain;
  for (const auto& [to, from] : copies) {
    const bool whole = chunks.number() == 1 || !to.is_contiguous() || !from.is_contiguous();
    if (whole) {
      if (index == with_gaps) queue_one(to, from);
      continue;
    }
    for (const communicator::ElementRange& part :
         chunks.parts(static_cast<size_t>(to.numel()), index)) {
      const auto start = static_cast<int64_t>(part.offset);
      const auto length = static_cast<int64_t>(part.count);
      queue_one(to.view({-1}).narrow(0, start, length), from.view({-1}).narrow(0, start, length));
    }
  }
}

// Returns true if the event has occurred. Returns `if_lost` for a lost device, whose remaining
// writes are unknown.
bool is_over(const c10::Event& event, bool if_lost) {
  try {
    return event.query();
  } catch (const std::exception&) {
    return if_lost;
  }
}

bool are_over(const std::vector<c10::Event>& events) {
  return std::ranges::all_of(
      events, [](const c10::Event& event) { return is_over(event, /*if_lost=*/false); });
}

// Owns the host copies of ended operations while transfers to or from the device may still read or
// write them.
class UnfreedHostCopies {
 public:
  static UnfreedHostCopies& of_process() {
    static auto* const left = new UnfreedHostCopies;  // never destroyed: threads may use it at exit
    return *left;
  }

  // Keeps the tensors until the events have occurred, or for ever if there is no event.
  void keep(std::vector<at::Tensor> host_copies, std::vector<c10::Event> over) {
    const std::lock_guard lock(mutex_);
    unfreed_.push_back({std::move(host_copies), std::move(over)});
  }

  void free_unused() {
    std::vector<HostCopies> unused;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    const auto first = std::partition(unfreed_.begin(), unfreed_.end(), [](const HostCopies& each) {
      return each.over.empty() || !are_over(each.over);
    });
    std::move(first, unfreed_.end(), std::back_inserter(unused));
    unfreed_.erase(first, unfreed_.end());
  }

 private:
  struct HostCopies {
    std::vector<at::Tensor> tensors;
    std::vector<c10::Event> over;
  };

  std::mutex mutex_;  // guards unfreed_
  std::vector<HostCopies> unfreed_;
};

}  // namespace

DeviceResult::DeviceResult(c10::Stream stream, const Copies& to_device) : stream_(stream) {
  for (const auto& [tensor, host_copy] : to_device) written_.push_back(memory_of(tensor));
}

DeviceResult::AddressRange DeviceResult::memory_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
  return {begin, begin + tensor.storage().nbytes()};
}

void DeviceResult::block_current_stream() const {
  if (!event_) return;
  const c10::impl::VirtualGuardImpl guard(device().type());
  const c10::Stream current = guard.getStream(device());
  event_->block(current);
  for (const at::Tensor& tensor : allocated_) {
    guard.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
  }
}

void DeviceResult::block_after_error() const noexcept {
  try {
    block_current_stream();
  } catch (const std::exception&) {  // the device is lost
  }
}

bool DeviceResult::finished() const {
  return ended_.load(std::memory_order_acquire) && (!event_ || is_over(*event_, /*if_lost=*/true));
}

bool DeviceResult::is_read_by(const Copies& copies) const {
  for (const auto& [host_copy, tensor] : copies) {
    const AddressRange read = memory_of(tensor);
    for (const AddressRange& written : written_) {
      if (read.begin < written.end && written.begin < read.end) return true;
    }
  }
  return false;
}

DeviceTransfer::DeviceTransfer(std::shared_ptr<DeviceStreams> streams, Copies to_host,
                               Copies to_device, Prepare prepare, Chunks chunks)
    : streams_(std::move(streams)),
      result_(std::make_shared<DeviceResult>(streams_->to_device(), to_device)),
      reads_(!to_host.empty()),
      prepare_(std::move(prepare)),
      chunks_(chunks),
      issued_(streams_->record(streams_->current())),
      to_host_(std::move(to_host)),
      to_device_(std::move(to_device)) {}

DeviceTransfer::DeviceTransfer(std::shared_ptr<DeviceStreams> streams, MakeCopies to_host,
                               MakeCopies to_device)
    : streams_(std::move(streams)),
      result_(std::make_shared<DeviceResult>(streams_->to_device(), Copies())),
      reads_(true),
      issued_(streams_->record(streams_->current())),
      make_to_host_(std::move(to_host)),
      make_to_device_(std::move(to_device)) {}

void DeviceTransfer::free_unused() { UnfreedHostCopies::of_process().free_unused(); }

void DeviceTransfer::issue() {
  if (make_to_host_ || streams_->is_result_read_by(to_host_, result_)) return;
  started_ = true;
  try {
    copy_to_host();
  } catch (...) {
    failed_ = std::current_exception();
  }
}

void DeviceTransfer::start_to_host() {
  if (std::exchange(started_, true)) return;
  if (make_to_host_) to_host_ = make_to_host_();
  streams_->record(streams_->to_device()).block(streams_->to_host());
  copy_to_host();
}

void DeviceTransfer::copy_to_host() {
  if (to_host_.empty()) return;
  const c10::Stream stream = streams_->to_host();
  issued_.block(stream);
  for (const auto& [host_copy, tensor] : to_host_) streams_->keep_for(tensor, stream);
  in_doubt_ = true;
  for (size_t index = 0; index < chunks_.number(); ++index) {
    queue(to_host_, stream, chunks_, index, /*with_gaps=*/0);
    arriving_.push_back(streams_->record(stream));
  }
  in_doubt_ = false;
}

bool DeviceTransfer::arrived(size_t index) const {
  if (failed_) std::rethrow_exception(failed_);
  return arriving_.empty() || arriving_[index].query();
}

void DeviceTransfer::prepare(size_t index) const {
  if (prepare_) prepare_(chunks_, index);
}

void DeviceTransfer::start_to_device(size_t index) {
  const size_t last = chunks_.number() - 1;
  if (make_to_device_) {
    to_device_ = make_to_device_();
    for (const auto& [tensor, host_copy] : to_device_) result_->allocated_.push_back(tensor);
  }
  if (!to_device_.empty()) {
    const c10::Stream stream = streams_->to_device();
    if (index == 0) {
      issued_.block(stream);
      for (const auto& [tensor, host_copy] : to_device_) streams_->keep_for(tensor, stream);
    }
    in_doubt_ = true;
    queue(to_device_, stream, chunks_, index, /*with_gaps=*/last);
    result_->event_ = streams_->record(stream);  // also used if a later chunk fails
    leaving_ = streams_->record(stream);
    in_doubt_ = false;
  }
  if (index == last) release();
}

// Releases the tensors. Host copies that a copy may still use are freed later.
void DeviceTransfer::release() noexcept {
  result_->end();
  std::vector<at::Tensor> host_copies;
  for (const auto& [host_copy, tensor] : to_host_) host_copies.push_back(host_copy);
  for (const auto& [tensor, host_copy] : to_device_) host_copies.push_back(host_copy);
  std::vector<c10::Event> over;
  if (!arriving_.empty()) over.push_back(std::move(arriving_.back()));
  if (leaving_) over.push_back(std::move(*leaving_));
  if (in_doubt_) {
    UnfreedHostCopies::of_process().keep(std::move(host_copies), {});
  } else if (!are_over(over)) {
    UnfreedHostCopies::of_process().keep(std::move(host_copies), std::move(over));
  }
  arriving_.clear();
  leaving_.reset();
  to_host_.clear();
  to_device_.clear();
}

}  // namespace hbm::process_group
