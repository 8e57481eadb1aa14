// Cuts reads and writes into slices, which the connections of a transport take when they have room.
// So a slow connection takes fewer. A slice boundary never divides an aligned element of up to 8
// bytes.
//
// Threads: any. Only put() and finish() access a TransportRequest: finish() does so for a slice
// that has failed, and for the last slice. The thread that took a slice accesses the memory at
// Slice::local.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "box/protocol/protocol.h"
#include "box/transport/transport.h"
#include "box/transport/tuning.h"

namespace hbm::box::transport {

class SlicedRequest;  // a request with slices in flight or still to be cut

struct Slice {
  std::shared_ptr<SlicedRequest> of;
  protocol::Opcode opcode{};
  protocol::Transfer transfer{};
  std::byte* local = nullptr;
};

class Slices {
 public:
  Slices();
  ~Slices();

  // Queues a kRead or kWrite without waking waiters; notify() wakes them.
  void put(TransportRequest& request);

  // Returns the next slice, or none.
  std::optional<Slice> take();

  // Sleeps until there is a slice. Returns none after stop().
  std::optional<Slice> wait();

  // Wakes one of the threads in wait() if a single short request is queued, else all threads in
  // wait().
  void notify();

  bool left() const;     // true: take() returns a slice
  bool awaited() const;  // true: a thread sleeps in wait()

  // Records the reply to a slice. Returns true if its request is finished; the request must not be
  // accessed afterwards.
  bool finish(const Slice& slice, protocol::Status status, const std::string& cause);

  // Ends all present and later calls of wait().
  void stop();

 private:
  std::optional<Slice> next();

  mutable std::mutex mutex_;  // guards all below, and the SlicedRequests
  std::condition_variable put_;
  std::deque<std::shared_ptr<SlicedRequest>> overtaking_;
  std::deque<std::shared_ptr<SlicedRequest>> ordinary_;
  uint32_t waiting_ = 0;
  bool stopped_ = false;
};

}  // namespace hbm::box::transport
