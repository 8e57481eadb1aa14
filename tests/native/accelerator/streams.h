// The streams of the test accelerator. Each stream is a thread that runs its tasks in order, and
// late: it may sleep before a task. An event is a point in a stream's order (Moment).
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

// A point in the order of a stream's tasks, reached once all tasks before it are done.
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

// Returns a moment that `stream` reaches after all tasks that it has been given so far.
std::shared_ptr<Moment> record(const c10::Stream& stream);
// Queues a wait for the moment on `stream`.
void block(const c10::Stream& stream, std::shared_ptr<Moment> moment);

// Make the calling thread wait: for all tasks of a stream, for a moment, or for all tasks of a
// device. synchronizations() counts these waits; a wait for a device counts once for each stream.
void synchronize(const c10::Stream& stream);
void synchronize(const Moment& moment);
void synchronize(c10::DeviceIndex device);
int64_t synchronizations();

// Sets the longest sleep of a stream before a task. Streams sleep before half of their tasks.
void set_longest_delay(std::chrono::microseconds delay);

// Keeps the stream from beginning a task until release().
void hold(const c10::Stream& stream);
void release(const c10::Stream& stream);

// Direction of the copies between the device and the host. A stream that reaches a copy waits in
// await_copy() until allow_copies() allows the copy.
enum class Direction { kToHost, kToDevice };
void await_copy(Direction direction);
void count_copy(Direction direction);
int64_t copies(Direction direction);  // completed copies
// Allows `more` further copies after the completed ones, or all copies if `more` is negative.
void allow_copies(Direction direction, int64_t more);

// Makes the stream pretend that it records a graph.
void set_capturing(const c10::Stream& stream, bool capturing);
bool is_capturing(const c10::Stream& stream);

}  // namespace late
