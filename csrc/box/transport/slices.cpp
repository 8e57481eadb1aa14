#include "box/transport/slices.h"

#include <algorithm>

namespace hbm::box::transport {

class SlicedRequest {
 public:
  explicit SlicedRequest(TransportRequest& of)
      : request(of),
        opcode(of.opcode),
        handle(of.grant->handle),
        offset(of.offset),
        local(of.local),
        left(of.bytes) {}

  Slice cut() {
    Slice slice;
    slice.opcode = opcode;
    slice.transfer.offset = offset;
    // End at a multiple of 8, so that no element is in two slices.
    const uint64_t most = kSliceBytes - offset % sizeof(uint64_t);
    slice.transfer.bytes = static_cast<uint32_t>(std::min(left, most));
    slice.transfer.handle = handle;
    slice.local = local;
    offset += slice.transfer.bytes;
    local += slice.transfer.bytes;
    left -= slice.transfer.bytes;
    all_cut = left == 0;
    ++out;
    return slice;
  }

  TransportRequest& request;  // valid until the last slice is answered
  const protocol::Opcode opcode;
  const uint32_t handle;
  uint64_t offset;  // `offset`, `local` and `left` describe the part that is not cut yet
  std::byte* local;
  uint64_t left;
  bool all_cut = false;  // true once the last slice is cut; an empty transfer has one slice too
  uint64_t out = 0;      // slices without a reply
};

Slices::Slices() = default;
Slices::~Slices() = default;

void Slices::put(TransportRequest& request) {
  request.status = protocol::Status::kOk;
  request.cause.clear();
  const auto sliced = std::make_shared<SlicedRequest>(request);
  const std::lock_guard lock(mutex_);
  (request.bytes <= kOvertakingBytes ? overtaking_ : ordinary_).push_back(sliced);
}

std::optional<Slice> Slices::next() {
  for (auto* const queue : {&overtaking_, &ordinary_}) {
    if (queue->empty()) continue;
    const std::shared_ptr<SlicedRequest> sliced = queue->front();
    Slice slice = sliced->cut();
    slice.of = sliced;
    if (sliced->all_cut) queue->pop_front();
    return slice;
  }
  return std::nullopt;
}

std::optional<Slice> Slices::take() {
  const std::lock_guard lock(mutex_);
  return next();
}

std::optional<Slice> Slices::wait() {
  std::unique_lock lock(mutex_);
  ++waiting_;
  put_.wait(lock, [&] { return stopped_ || !overtaking_.empty() || !ordinary_.empty(); });
  --waiting_;
  if (stopped_) return std::nullopt;
  return next();
}

void Slices::notify() {
  const std::lock_guard lock(mutex_);
  if (waiting_ == 0) return;
  if (ordinary_.empty() && overtaking_.size() == 1) {
    put_.notify_one();
  } else {
    put_.notify_all();
  }
}

bool Slices::left() const {
  const std::lock_guard lock(mutex_);
  return !overtaking_.empty() || !ordinary_.empty();
}

bool Slices::awaited() const {
  const std::lock_guard lock(mutex_);
  return waiting_ > 0;
}

bool Slices::finish(const Slice& slice, protocol::Status status, const std::string& cause) {
  const std::lock_guard lock(mutex_);
  SlicedRequest& sliced = *slice.of;
  --sliced.out;
  if (status != protocol::Status::kOk && sliced.request.status == protocol::Status::kOk) {
    sliced.request.status = status;
    sliced.request.cause = cause;
    if (!sliced.all_cut) std::erase(ordinary_, slice.of);  // the remaining slices would fail too
    sliced.all_cut = true;
  }
  if (!sliced.all_cut || sliced.out != 0) return false;
  sliced.request.done.store(true, std::memory_order_release);
  return true;
}

void Slices::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  put_.notify_all();
}

}  // namespace hbm::box::transport
