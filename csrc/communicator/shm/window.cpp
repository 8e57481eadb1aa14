#include "communicator/shm/window.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "communicator/shm/control_region.h"
#include "communicator/shm/doorbell_operation.h"
#include "communicator/shm/tuning.h"

namespace hbm::communicator::shm {
namespace {

// The signals that one local rank has sent to the owner of the block, as a total of each channel.
// That rank alone writes here.
struct alignas(kCacheLine) SignalCounts {
  std::array<std::atomic<uint64_t>, kSignalChannels> sent{};
  std::atomic<bool> released{false};  // the local rank no longer uses the window
};

SignalCounts* allocate_counts(const ShmGroup& shm_group) {
  auto* const counts =
      reinterpret_cast<SignalCounts*>(shm_group.allocate(shm_group.size() * sizeof(SignalCounts)));
  for (size_t i = 0; i < shm_group.size(); ++i) new (counts + i) SignalCounts;
  return counts;
}

class ShmWindow final : public SharedWindow, public std::enable_shared_from_this<ShmWindow> {
 public:
  ShmWindow(std::shared_ptr<ShmGroup> shm_group, uint64_t data, size_t bytes)
      : shm_group_(std::move(shm_group)),
        targets_(shm_group_->size()),
        taken_(shm_group_->size()),
        received_(allocate_counts(*shm_group_)) {
    const size_t counts = shm_group_->size() * sizeof(SignalCounts);
    part_ = {data, bytes, *shm_group_->offset_in_segment(received_, counts)};
  }

  const WindowPart& part() const noexcept override { return part_; }
  void connect(const std::vector<WindowPart>& parts) override;

  std::byte* data(int rank) const noexcept override {
    const auto local_rank = static_cast<size_t>(rank);
    return shm_group_->at(local_rank, parts_[local_rank].data);
  }

  OperationPtr put(Source in, Dtype dtype, int to, size_t offset) override;
  OperationPtr signal(int to, int channel) override;
  OperationPtr wait_signal(int from, int channel) override;
  OperationPtr drain() override;

  size_t waits() const override {
    const std::lock_guard lock(mutex_);
    return waits_;
  }

  void reopen() override {
    const std::lock_guard lock(mutex_);
    closed_ = false;
  }

  bool release() override;

  bool released() const override {
    const std::lock_guard lock(mutex_);
    return received_ == nullptr ||
           std::all_of(received_, received_ + shm_group_->size(), [](const SignalCounts& counts) {
             return counts.released.load(std::memory_order_acquire);
           });
  }

  void close() override {
    std::unique_lock lock(mutex_);
    SignalCounts* const counts = std::exchange(received_, nullptr);
    lock.unlock();
    if (counts != nullptr) shm_group_->free(reinterpret_cast<std::byte*>(counts));
  }

  // For the operations of this window.

  const std::shared_ptr<ShmGroup>& shm_group() const noexcept { return shm_group_; }

  // Gives `operation`, which begins, its position among the operations on local rank `to`. Throws
  // Error(kInvalid) if the window is closed.
  uint64_t enter(size_t to, const progress::Operation& operation) {
    const std::lock_guard lock(mutex_);
    require_open(operation);
    return targets_[to].entered++;
  }

  // Returns true if all operations on local rank `to` before this position have ended.
  bool is_next(size_t to, uint64_t position) const {
    const std::lock_guard lock(mutex_);
    return targets_[to].next == position;
  }

  // The operation at this position has ended, or was given up.
  void leave(size_t to, uint64_t position);

  // `put`, which has a position, was given up: local rank `to` lacks its data. Later operations on
  // the rank must not act, because a signal would say that the data are there.
  void lose(size_t to, const progress::Operation& put) noexcept {
    std::string lost = "a put";  // short, so it needs no memory
    try {
      lost = put.describe();
    } catch (const std::bad_alloc&) {
    }
    const std::lock_guard lock(mutex_);
    if (targets_[to].lost.empty()) targets_[to].lost.swap(lost);
  }

  // Throws Error(kAborted) if a put to local rank `to` was given up before `operation`.
  void require_no_loss(size_t to, const progress::Operation& operation) const {
    const std::lock_guard lock(mutex_);
    if (targets_[to].lost.empty()) return;
    throw Error(
        ErrorKind::kAborted,
        operation.describe() + " was refused: an earlier operation, " + targets_[to].lost +
            ", failed, timed out or was cancelled, so the target lacks its data; deregister "
            "the tensor of the window on all ranks, and register it again");
  }

  // Adds one signal for local rank `to`, after all data that this rank has put there.
  void send_signal(size_t to, size_t channel) noexcept {
    counts_at(to).sent[channel].fetch_add(1, std::memory_order_release);
    shm_group_->ring_messages(to);
  }

  // `operation` waits for a signal from now on, until end_wait(). Throws as enter().
  void begin_wait(const progress::Operation& operation) {
    const std::lock_guard lock(mutex_);
    require_open(operation);
    ++waits_;
  }

  void end_wait() noexcept {
    const std::lock_guard lock(mutex_);
    --waits_;
  }

  // Takes a signal of local rank `from`. Returns false if there is none.
  bool take_signal(size_t from, size_t channel) {
    const std::lock_guard lock(mutex_);
    uint64_t& taken = taken_[from][channel];
    if (received_[from].sent[channel].load(std::memory_order_acquire) == taken) return false;
    ++taken;
    return true;
  }

  // Closes the window to further operations. Returns, for each local rank, the number of operations
  // that have begun on it.
  std::vector<uint64_t> shut();

  // Returns true if the first `begun` operations on each local rank have ended.
  bool have_ended(const std::vector<uint64_t>& begun) const;

 private:
  // Returns the counts of this rank in the block of a local rank.
  SignalCounts& counts_at(size_t owner) const noexcept {
    auto* const counts =
        reinterpret_cast<SignalCounts*>(shm_group_->at(owner, parts_[owner].signals));
    return counts[shm_group_->self()];
  }

  // The operations of this rank on one local rank.
  struct Target {
    uint64_t entered = 0;     // positions given out
    uint64_t next = 0;        // the first position that has not ended
    std::set<uint64_t> left;  // positions after `next` that have ended
    std::string lost;         // describes the first put that was given up; empty: none
  };

  void require_open(const progress::Operation& operation) const {
    if (!closed_) return;
    throw Error(ErrorKind::kInvalid,
                operation.describe() +
                    " cannot begin: this rank is deregistering the tensor of the window, or has "
                    "done so");
  }

  const std::shared_ptr<ShmGroup> shm_group_;
  WindowPart part_;                // constant after construction
  std::vector<WindowPart> parts_;  // by local rank; constant after connect()

  mutable std::mutex mutex_;     // guards the members below; no thread waits while it holds it
  std::vector<Target> targets_;  // by local rank
  // Signals taken so far, by local rank and channel.
  std::vector<std::array<uint64_t, kSignalChannels>> taken_;
  SignalCounts* received_;  // the block of this rank; null after close()
  size_t waits_ = 0;
  bool closed_ = false;
  bool released_ = false;
};

void ShmWindow::connect(const std::vector<WindowPart>& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    shm_group_->address_in_segment(i, parts[i].data, parts[i].bytes);
    shm_group_->address_in_segment(i, parts[i].signals, parts.size() * sizeof(SignalCounts));
    if (parts[i].signals % kCacheLine == 0) continue;
    throw Error(ErrorKind::kMismatch, shm_group_->local_rank(i).name + " of " +
                                          shm_group_->group() + " names counts of signals at " +
                                          std::to_string(parts[i].signals) +
                                          " of its shared segment, which is no multiple of " +
                                          std::to_string(kCacheLine));
  }
  parts_ = parts;
}

void ShmWindow::leave(size_t to, uint64_t position) {
  bool others = false;
  {
    const std::lock_guard lock(mutex_);
    Target& target = targets_[to];
    if (position == target.next) {
      ++target.next;
      while (target.left.erase(target.next) > 0) ++target.next;
    } else {
      target.left.insert(position);
    }
    others = target.next < target.entered;
  }
  if (others) shm_group_->ring_messages(shm_group_->self());  // the next operation may act now
}

std::vector<uint64_t> ShmWindow::shut() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  std::vector<uint64_t> begun;
  for (const Target& target : targets_) begun.push_back(target.entered);
  return begun;
}

bool ShmWindow::release() {
  const std::lock_guard lock(mutex_);
  if (released_) return true;  // a rank may have freed its counts since
  closed_ = true;
  const bool busy = std::ranges::any_of(
      targets_, [](const Target& target) { return target.next < target.entered; });
  if (busy || waits_ > 0) return false;
  for (size_t i = 0; i < parts_.size(); ++i) {
    counts_at(i).released.store(true, std::memory_order_release);
  }
  released_ = true;
  return true;
}

bool ShmWindow::have_ended(const std::vector<uint64_t>& begun) const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < begun.size(); ++i) {
    if (targets_[i].next < begun[i]) return false;
  }
  return true;
}

// The common part of the operations of a window.
class WindowOperation : public DoorbellOperation {
 public:
  bool self_sufficient() const final { return false; }

 protected:
  explicit WindowOperation(std::shared_ptr<ShmWindow> window)
      : DoorbellOperation(window->shm_group()), window_(std::move(window)) {}

  // Returns `text`, a description of the operation, with this rank and the group.
  std::string in_group(const std::string& text) const {
    return "window " + text + " on rank " + std::to_string(rank_of(shm_group().self())) + " of " +
           shm_group().group();
  }

  const std::shared_ptr<ShmWindow> window_;
};

// An operation on a target. It acts when all earlier operations on the target have ended. Before it
// acts, it throws if the target has died or left, the group has failed, or an earlier put to the
// target was given up.
class TargetOperation : public WindowOperation {
 public:
  void begin() final { position_ = window_->enter(to_, *this); }

  std::vector<int> missing() const final { return {rank_of(to_)}; }

  void abandon() noexcept final {
    if (position_ && carries_data()) window_->lose(to_, *this);
    leave();
  }

 protected:
  TargetOperation(std::shared_ptr<ShmWindow> window, int to)
      : WindowOperation(std::move(window)), to_(static_cast<size_t>(to)) {}

  progress::Progress advance() final {
    if (!window_->is_next(to_, *position_)) return progress::Progress::kIdle;
    if (!acted_) {
      shm_group().require_alive(missing(), *this, [] { return false; });
      window_->require_no_loss(to_, *this);
      acted_ = true;
    }
    const progress::Progress progress = act();
    if (progress == progress::Progress::kDone) leave();
    return progress;
  }

  // Does a part of the operation; returns kDone or kActive.
  virtual progress::Progress act() = 0;

  // Returns true if the target needs the operation's effect before later ones.
  virtual bool carries_data() const noexcept = 0;

  const size_t to_;

 private:
  void leave() noexcept {
    if (position_) window_->leave(to_, *position_);
    position_.reset();
  }

  std::optional<uint64_t> position_;  // set from begin() to the end
  bool acted_ = false;
};

class Put final : public TargetOperation {
 public:
  Put(std::shared_ptr<ShmWindow> window, Source in, Dtype dtype, int to, size_t offset)
      : TargetOperation(std::move(window), to),
        from_(static_cast<const std::byte*>(in.data)),
        count_(in.count),
        dtype_(dtype),
        destination_(window_->data(to) + offset) {}

  std::string describe() const override {
    return in_group("put of " + std::to_string(count_) + " " + dtype_name(dtype_) + " to rank " +
                    std::to_string(rank_of(to_)));
  }

 private:
  progress::Progress act() override {
    const size_t bytes = count_ * element_size(dtype_);
    const size_t slice = std::min(bytes - copied_, kBytesPerPoll);
    if (slice > 0)
      shm_group().parallel().copy(destination_ + copied_, from_ + copied_, slice, bytes);
    copied_ += slice;
    return copied_ == bytes ? progress::Progress::kDone : progress::Progress::kActive;
  }

  bool carries_data() const noexcept override { return true; }

  const std::byte* const from_;
  const size_t count_;
  const Dtype dtype_;
  std::byte* const destination_;
  size_t copied_ = 0;  // bytes
};

class Signal final : public TargetOperation {
 public:
  Signal(std::shared_ptr<ShmWindow> window, int to, int channel)
      : TargetOperation(std::move(window), to), channel_(static_cast<size_t>(channel)) {}

  std::string describe() const override {
    return in_group("signal to rank " + std::to_string(rank_of(to_)));
  }

 private:
  progress::Progress act() override {
    window_->send_signal(to_, channel_);
    return progress::Progress::kDone;
  }

  bool carries_data() const noexcept override { return false; }

  const size_t channel_;
};

class WaitSignal final : public WindowOperation {
 public:
  WaitSignal(std::shared_ptr<ShmWindow> window, int from, int channel)
      : WindowOperation(std::move(window)),
        from_(static_cast<size_t>(from)),
        channel_(static_cast<size_t>(channel)) {}

  void begin() override {
    window_->begin_wait(*this);
    waits_ = true;
  }

  std::vector<int> missing() const override { return {rank_of(from_)}; }

  std::string describe() const override {
    return in_group("wait_signal from rank " + std::to_string(rank_of(from_)));
  }

  void abandon() noexcept override { end(); }

 private:
  progress::Progress advance() override {
    if (!window_->take_signal(from_, channel_)) return progress::Progress::kIdle;
    end();
    return progress::Progress::kDone;
  }

  void end() noexcept {
    if (std::exchange(waits_, false)) window_->end_wait();
  }

  const size_t from_;
  const size_t channel_;
  bool waits_ = false;
};

class Drain final : public WindowOperation {
 public:
  explicit Drain(std::shared_ptr<ShmWindow> window) : WindowOperation(std::move(window)) {}

  void begin() override { begun_ = window_->shut(); }

  std::vector<int> missing() const override { return {}; }

  std::string describe() const override { return in_group("drain"); }

  void abandon() noexcept override {}

 private:
  progress::Progress advance() override {
    return window_->have_ended(begun_) ? progress::Progress::kDone : progress::Progress::kIdle;
  }

  std::vector<uint64_t> begun_;
};

OperationPtr ShmWindow::put(Source in, Dtype dtype, int to, size_t offset) {
  return std::make_unique<Put>(shared_from_this(), in, dtype, to, offset);
}

OperationPtr ShmWindow::signal(int to, int channel) {
  return std::make_unique<Signal>(shared_from_this(), to, channel);
}

OperationPtr ShmWindow::wait_signal(int from, int channel) {
  return std::make_unique<WaitSignal>(shared_from_this(), from, channel);
}

OperationPtr ShmWindow::drain() { return std::make_unique<Drain>(shared_from_this()); }

}  // namespace

std::shared_ptr<SharedWindow> make_window(std::shared_ptr<ShmGroup> shm_group, const void* data,
                                          size_t bytes) {
  const auto offset =
      bytes == 0 ? std::optional<uint64_t>(0) : shm_group->offset_in_segment(data, bytes);
  if (!offset) return nullptr;
  return std::make_shared<ShmWindow>(std::move(shm_group), *offset, bytes);
}

}  // namespace hbm::communicator::shm
