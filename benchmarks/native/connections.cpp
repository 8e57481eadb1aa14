#include "connections.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <barrier>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <thread>

#include "base/descriptor.h"
#include "base/error.h"

namespace hbm::bench {
namespace {

using Part = std::span<std::byte>;

enum class Direction : uint64_t { kSend, kReceive };

struct Request {
  Direction direction;  // kSend: the server sends
  uint64_t bytes;
  std::array<std::byte, 24> reserved;  // makes requests as long as the box's: 40 bytes
};
static_assert(sizeof(Request) == 40);

[[noreturn]] void failed(const char* call) {
  throw Error(ErrorKind::kNetwork,
              std::string(call) + " on a socket failed: " + std::strerror(errno));
}

// Calls send or recv once, with `flags`. Returns the bytes of `part` that remain to be moved.
Part moved(int socket, Direction direction, Part part, int flags) {
  const bool sending = direction == Direction::kSend;
  const ssize_t done = sending ? send(socket, part.data(), part.size(), flags | MSG_NOSIGNAL)
                               : recv(socket, part.data(), part.size(), flags);
  if (done > 0) return part.subspan(static_cast<size_t>(done));
  if (done == 0) throw Error(ErrorKind::kNetwork, "the other end closed the socket");
  if (errno == EAGAIN || errno == EINTR) return part;
  failed(sending ? "send" : "recv");
}

void move_whole(int socket, Direction direction, Part part) {
  const int flags = direction == Direction::kReceive ? MSG_WAITALL : 0;
  while (!part.empty()) part = moved(socket, direction, part, flags);
}

template <class T>
Part bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace

class ConnectionEnd {
 public:
  explicit ConnectionEnd(std::vector<int> sockets) {
    for (const int socket : sockets) sockets_.emplace_back(socket);
    if (sockets_.empty()) throw Error(ErrorKind::kInvalid, "a copy needs at least one socket");
  }
  virtual ~ConnectionEnd() = default;

  virtual void move(Direction direction, Part buffer) = 0;

  void read(Part to) {
    request(Direction::kSend, to.size());
    move(Direction::kReceive, to);
  }

  void write(Part from) {
    request(Direction::kReceive, from.size());
    move(Direction::kSend, from);
    std::byte taken{};
    move_whole(first(), Direction::kReceive, bytes_of(taken));
  }

  // Answers one request. Returns false if the client has closed its end.
  bool answer(Part buffer) {
    Request request{};
    const ssize_t got = recv(first(), &request, sizeof(request), MSG_WAITALL);
    if (got == 0) return false;
    if (got != sizeof(request)) failed("recv");
    if (request.bytes != buffer.size()) {
      throw Error(ErrorKind::kInvalid, "the client requested " + std::to_string(request.bytes) +
                                           " bytes; the buffer has " +
                                           std::to_string(buffer.size()));
    }
    move(request.direction, buffer);
    if (request.direction == Direction::kReceive) {
      std::byte taken{};
      move_whole(first(), Direction::kSend, bytes_of(taken));
    }
    return true;
  }

 protected:
  size_t count() const { return sockets_.size(); }
  int socket(size_t index) const { return sockets_[index].get(); }
  int first() const { return socket(0); }

  Part part_of(Part buffer, size_t index) const {
    const size_t begin = buffer.size() * index / count();
    return buffer.subspan(begin, buffer.size() * (index + 1) / count() - begin);
  }

 private:
  void request(Direction direction, size_t bytes) {
    Request request{.direction = direction, .bytes = bytes, .reserved = {}};
    move_whole(first(), Direction::kSend, bytes_of(request));
  }

  std::vector<Descriptor> sockets_;
};

namespace {

class PolledConnections : public ConnectionEnd {
 public:
  using ConnectionEnd::ConnectionEnd;

  void move(Direction direction, Part buffer) override {
    std::vector<Part> parts;
    std::vector<pollfd> waiting;
    const short event = direction == Direction::kSend ? POLLOUT : POLLIN;
    for (size_t index = 0; index < count(); ++index) {
      parts.push_back(part_of(buffer, index));
      waiting.push_back({socket(index), event, 0});
    }
    for (;;) {
      bool progress = false;
      bool finished = true;
      for (size_t index = 0; index < count(); ++index) {
        if (parts[index].empty()) continue;
        const size_t before = parts[index].size();
        parts[index] = moved(socket(index), direction, parts[index], MSG_DONTWAIT);
        progress |= parts[index].size() < before;
        finished &= parts[index].empty();
        if (parts[index].empty()) waiting[index].fd = -1;  // poll() ignores it
      }
      if (finished) return;
      if (!progress && poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) {
        failed("poll");
      }
    }
  }
};

// The caller's thread moves the data of the first connection, and each other connection has a
// thread. If several connections fail, move() throws the exception of the first one in their order.
class ThreadedConnections : public ConnectionEnd {
 public:
  explicit ThreadedConnections(std::vector<int> sockets)
      : ConnectionEnd(std::move(sockets)), together_(static_cast<std::ptrdiff_t>(count())) {
    failures_.resize(count());
    for (size_t index = 1; index < count(); ++index) {
      threads_.emplace_back([this, index] {
        for (;;) {
          together_.arrive_and_wait();
          if (ending_) return;
          move_part(index);
          together_.arrive_and_wait();
        }
      });
    }
  }

  ~ThreadedConnections() override {
    ending_ = true;
    together_.arrive_and_wait();
  }

  void move(Direction direction, Part buffer) override {
    direction_ = direction;
    buffer_ = buffer;
    together_.arrive_and_wait();
    move_part(0);
    together_.arrive_and_wait();
    for (const std::exception_ptr& failure : failures_) {
      if (failure) std::rethrow_exception(failure);
    }
  }

 private:
  void move_part(size_t index) {
    try {
      move_whole(socket(index), direction_, part_of(buffer_, index));
    } catch (...) {
      failures_[index] = std::current_exception();
    }
  }

  std::barrier<> together_;
  // The caller of move() writes these before the first barrier of move(), at which the threads
  // wait.
  Direction direction_{};
  Part buffer_;
  bool ending_ = false;
  std::vector<std::exception_ptr> failures_;  // one per connection
  std::vector<std::jthread> threads_;
};

std::unique_ptr<ConnectionEnd> made(std::vector<int> sockets, ConnectionMode mode) {
  if (mode == ConnectionMode::kPoll) return std::make_unique<PolledConnections>(std::move(sockets));
  return std::make_unique<ThreadedConnections>(std::move(sockets));
}

}  // namespace

Connections::Connections(std::vector<int> sockets, std::span<std::byte> buffer, ConnectionMode mode)
    : buffer_(buffer), end_(made(std::move(sockets), mode)) {}
Connections::~Connections() = default;

void Connections::read() { end_->read(buffer_); }

void Connections::write() { end_->write(buffer_); }

void Connections::serve() {
  while (end_->answer(buffer_)) {
  }
}

}  // namespace hbm::bench
