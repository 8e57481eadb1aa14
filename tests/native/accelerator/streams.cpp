#include "streams.h"

#include <atomic>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "memory.h"

namespace late {
namespace {

constexpr size_t kPool = 4;

std::atomic<int64_t> longest_delay_us{300};
std::atomic<int64_t> waits{0};

class Worker {
 public:
  Worker() {
    std::thread([this] { work(); }).detach();
  }

  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  void hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }

  std::atomic<bool> capturing{false};

 private:
  [[noreturn]] void work() {
    const char* const seed = std::getenv("HBMCOMM_TEST_SEED");
    std::mt19937_64 random(seed == nullptr ? std::random_device{}()
                                           : std::strtoull(seed, nullptr, 10));
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !held_ && !tasks_.empty(); });
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      const auto longest = static_cast<uint64_t>(longest_delay_us.load());
      if (longest > 0 && random() % 2 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % longest));
      }
      task();
    }
  }

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool held_ = false;
};

// The worker thread of each stream, by device and stream id. Workers are never destroyed.
class Workers {
 public:
  static Workers& get() {
    static auto* const workers = new Workers;
    return *workers;
  }

  Worker& of(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    auto& worker = workers_[{stream.device_index(), stream.id()}];
    if (worker == nullptr) worker = new Worker;
    return *worker;
  }

  std::vector<c10::StreamId> ids(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    std::vector<c10::StreamId> found;
    for (const auto& [stream, worker] : workers_) {
      if (stream.first == device) found.push_back(stream.second);
    }
    return found;
  }

  c10::StreamId new_id(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    return static_cast<c10::StreamId>(1 + kPool + made_[device]++);
  }

  c10::StreamId id_from_pool(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    return static_cast<c10::StreamId>(1 + taken_[device]++ % kPool);
  }

 private:
  std::mutex mutex_;  // guards the members below
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Worker*> workers_;
  size_t made_[kDevices] = {};
  size_t taken_[kDevices] = {};
};

class CopyGate {
 public:
  static CopyGate& of(Direction direction) {
    static auto* const gates = new CopyGate[2];
    return gates[static_cast<int>(direction)];
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return allowed_ < 0 || over_ < allowed_; });
  }

  void count() {
    const std::lock_guard lock(mutex_);
    ++over_;
  }

  int64_t over() {
    const std::lock_guard lock(mutex_);
    return over_;
  }

  void allow(int64_t more) {
    const std::lock_guard lock(mutex_);
    allowed_ = more < 0 ? -1 : over_ + more;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  int64_t over_ = 0;
  int64_t allowed_ = -1;
};

thread_local c10::DeviceIndex this_device = 0;
thread_local c10::StreamId this_stream[kDevices] = {};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id);
}

}  // namespace

void Moment::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  changed_.notify_all();
}

bool Moment::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

void Moment::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

c10::DeviceIndex current_device() { return this_device; }
void set_current_device(c10::DeviceIndex device) { this_device = device; }

c10::Stream current_stream(c10::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : this_device;
  return stream_of(index, this_stream[index]);
}

void set_current_stream(const c10::Stream& stream) {
  this_stream[stream.device_index()] = stream.id();
}

c10::Stream new_stream(c10::DeviceIndex device) {
  return stream_of(device, Workers::get().new_id(device));
}

c10::Stream stream_from_pool(c10::DeviceIndex device) {
  return stream_of(device, Workers::get().id_from_pool(device));
}

void enqueue(const c10::Stream& stream, std::function<void()> task) {
  Workers::get().of(stream).add(std::move(task));
}

std::shared_ptr<Moment> record(const c10::Stream& stream) {
  auto moment = std::make_shared<Moment>();
  enqueue(stream, [moment] { moment->reach(); });
  return moment;
}

void block(const c10::Stream& stream, std::shared_ptr<Moment> moment) {
  enqueue(stream, [moment = std::move(moment)] { moment->wait(); });
}

void synchronize(const c10::Stream& stream) { synchronize(*record(stream)); }

void synchronize(const Moment& moment) {
  ++waits;
  moment.wait();
}

void synchronize(c10::DeviceIndex device) {
  for (const c10::StreamId id : Workers::get().ids(device)) synchronize(stream_of(device, id));
}

int64_t synchronizations() { return waits; }

void set_longest_delay(std::chrono::microseconds delay) { longest_delay_us = delay.count(); }

void hold(const c10::Stream& stream) { Workers::get().of(stream).hold(true); }
void release(const c10::Stream& stream) { Workers::get().of(stream).hold(false); }

void await_copy(Direction direction) { CopyGate::of(direction).wait(); }
void count_copy(Direction direction) { CopyGate::of(direction).count(); }
int64_t copies(Direction direction) { return CopyGate::of(direction).over(); }
void allow_copies(Direction direction, int64_t more) { CopyGate::of(direction).allow(more); }

void set_capturing(const c10::Stream& stream, bool capturing) {
  Workers::get().of(stream).capturing = capturing;
}
bool is_capturing(const c10::Stream& stream) { return Workers::get().of(stream).capturing; }

}  // namespace late
