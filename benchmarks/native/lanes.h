// The bound of the tcp transport: a buffer copied between two processes over several connections at
// once, with nothing but send and recv.
//
// Both ends have as many lanes, in the same order. A request goes over the first; then each lane
// carries its equal part of the buffer, and after a write a byte comes back.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace hbm::bench {

// How an end moves the parts of a buffer. Which is faster depends on the machine and on the size.
enum class LaneMode {
  kPoll,     // one thread, on whichever lanes are ready
  kThreads,  // a blocking thread for each lane
};

class LaneEnd;  // of one mode

class Lanes {
 public:
  // Takes over connected stream sockets, which block. The buffers of both ends are of one size.
  Lanes(std::vector<int> sockets, std::span<std::byte> buffer, LaneMode mode);
  ~Lanes();

  // The client: copies the whole buffer, from the other end or to it. Both throw Error(kNetwork)
  // when the other end is gone.
  void read();
  void write();

  // The server: answers the client's requests until it closes.
  void serve();

 private:
  const std::span<std::byte> buffer_;
  const std::unique_ptr<LaneEnd> end_;
};

}  // namespace hbm::bench
