// The bound of the tcp transport: copies a buffer between two processes, over several connections
// at the same time, by send and recv alone.
//
// Both ends have the same connections, in the same order. The client sends a request over the first
// one. Then each connection transfers an equal part of the buffer. After a write, the server sends
// a byte back over the first connection.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace hbm::bench {

// How an end transfers the parts of a buffer. The machine and the size decide which mode is faster.
enum class ConnectionMode {
  kPoll,     // one thread, on all connections that are ready
  kThreads,  // one blocking thread per connection
};

class ConnectionEnd;

class Connections {
 public:
  // Takes ownership of connected, blocking stream sockets. The buffers of both ends have equal
  // sizes.
  Connections(std::vector<int> sockets, std::span<std::byte> buffer, ConnectionMode mode);
  ~Connections();

  // Called by the client. read() copies the whole buffer from the other end, and write() copies it
  // to the other end. Both throw Error(kNetwork) if the other end has closed.
  void read();
  void write();

  // Called by the server: answers the client's requests until the client closes.
  void serve();

 private:
  const std::span<std::byte> buffer_;
  const std::unique_ptr<ConnectionEnd> end_;
};

}  // namespace hbm::bench
