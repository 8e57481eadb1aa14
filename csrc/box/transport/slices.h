// Cuts reads and writes into slices, which the lanes of a transport take as they have room: a slow
// lane takes fewer. An aligned element of up to 8 bytes in a segment, all of which is moved, lies
// in one slice.
//
// Threads: every member may be called from any thread. A TransportRequest is touched by put() and
// by the finish() that returns true for it or that fails, and the memory that it names by whoever
// holds a slice.
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

namespace hbm::transport {

class SlicedRequest;  // of which slices are out or still to be cut

struct Slice {
  std::shared_ptr<SlicedRequest> of;
  smb::Opcode opcode{};
  smb::Transfer transfer{};
  std::byte* local = nullptr;
};

class Slices {
 public:
  Slices();
  ~Slices();

  // A kRead or kWrite. Nobody who waits is woken: see call().
  void put(TransportRequest& request);

  // None: all are taken.
  std::optional<Slice> take();

  // Sleeps until there is one; none: stopped.
  std::optional<Slice> wait();

  // Wakes those who wait, as many as may find one.
  void call();

  bool left() const;     // there is one to take
  bool awaited() const;  // someone sleeps in wait()

  // The box's answer. True: its request is finished, and not to be touched any more.
  bool finish(const Slice& slice, smb::Status status, const std::string& cause);

  // Ends every wait(), now and later.
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

}  // namespace hbm::transport
