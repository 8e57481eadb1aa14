// The streams of the test accelerator. Each is a thread that runs its tasks in order, and late:
// before a task it may sleep. An event is a point in a stream's order.
//
// Threads: every function may be called from any thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace late {

// A place in a stream's tasks.
class Moment {
 public:
  void reach();
  bool reached() const;
  void wait() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;  // guarded by mutex_
};

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);

c10::Stream current_stream(c10::Device device);
void set_current_stream(const c10::Stream& stream);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device);

void enqueue(const c10::Stream& stream, std::function<void()> task);

// Marks the place behind all that `stream` has been given.
std::shared_ptr<Moment> record(const c10::Stream& stream);
// Makes `stream` wait for the moment.
void block(const c10::Stream& stream, std::shared_ptr<Moment> moment);

// The calling thread waits for the device. Counted.
void synchronize(const c10::Stream& stream);
void synchronize(const Moment& moment);
void synchronize(c10::DeviceIndex device);
int64_t synchronizations();

// How long a stream sleeps at most before a task; it sleeps before half of them.
void set_longest_delay(std::chrono::microseconds delay);

// The stream begins no further task until release().
void hold(const c10::Stream& stream);
void release(const c10::Stream& stream);

// The copies between the device and the host, in one direction. A stream that comes to a copy waits
// until it is allowed.
enum class Direction { kToHost, kToDevice };
void await_copy(Direction direction);
void count_copy(Direction direction);
int64_t copies(Direction direction);  // completed copies
// Allows `more` copies beyond the completed ones; negative: all.
void allow_copies(Direction direction, int64_t more);

// The stream pretends to record a graph.
void set_capturing(const c10::Stream& stream, bool capturing);
bool is_capturing(const c10::Stream& stream);

}  // namespace late
