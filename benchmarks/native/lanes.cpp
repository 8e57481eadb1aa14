#include "lanes.h"

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
  Direction direction;  // the server's
  uint64_t bytes;
  std::array<std::byte, 24> reserved;  // the box's requests have 40 bytes
};
static_assert(sizeof(Request) == 40);

[[noreturn]] void failed(const char* call) {
  throw Error(ErrorKind::kNetwork, std::string(call) + " on a lane: " + std::strerror(errno));
}

// The rest of `part` after one call, which does not wait if `flags` say so.
Part moved(int socket, Direction direction, Part part, int flags) {
  const bool sending = direction == Direction::kSend;
  const ssize_t done = sending ? send(socket, part.data(), part.size(), flags | MSG_NOSIGNAL)
                               : recv(socket, part.data(), part.size(), flags);
  if (done > 0) return part.subspan(static_cast<size_t>(done));
  if (done == 0) throw Error(ErrorKind::kNetwork, "the other end of a lane is gone");
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

class LaneEnd {
 public:
  explicit LaneEnd(std::vector<int> sockets) {
    for (const int socket : sockets) sockets_.emplace_back(socket);
    if (sockets_.empty()) throw Error(ErrorKind::kInvalid, "a copy over sockets needs a lane");
  }
  virtual ~LaneEnd() = default;

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

  // False: the client has closed.
  bool answer(Part buffer) {
    Request request{};
    const ssize_t got = recv(first(), &request, sizeof(request), MSG_WAITALL);
    if (got == 0) return false;
    if (got != sizeof(request)) failed("recv");
    if (request.bytes != buffer.size()) {
      throw Error(ErrorKind::kInvalid, std::to_string(request.bytes) + " bytes are asked for, of " +
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
  int socket(size_t lane) const { return sockets_[lane].get(); }
  int first() const { return socket(0); }

  Part part_of(Part buffer, size_t lane) const {
    const size_t begin = buffer.size() * lane / count();
    return buffer.subspan(begin, buffer.size() * (lane + 1) / count() - begin);
  }

 private:
  void request(Direction direction, size_t bytes) {
    Request request{.direction = direction, .bytes = bytes, .reserved = {}};
    move_whole(first(), Direction::kSend, bytes_of(request));
  }

  std::vector<Descriptor> sockets_;
};

namespace {

class PolledLanes : public LaneEnd {
 public:
  using LaneEnd::LaneEnd;

  void move(Direction direction, Part buffer) override {
    std::vector<Part> parts;
    std::vector<pollfd> waiting;
    const short event = direction == Direction::kSend ? POLLOUT : POLLIN;
    for (size_t lane = 0; lane < count(); ++lane) {
      parts.push_back(part_of(buffer, lane));
      waiting.push_back({socket(lane), event, 0});
    }
    for (;;) {
      bool progress = false;
      bool finished = true;
      for (size_t lane = 0; lane < count(); ++lane) {
        if (parts[lane].empty()) continue;
        const size_t before = parts[lane].size();
        parts[lane] = moved(socket(lane), direction, parts[lane], MSG_DONTWAIT);
        progress |= parts[lane].size() < before;
        finished &= parts[lane].empty();
        if (parts[lane].empty()) waiting[lane].fd = -1;  // poll() ignores it
      }
      if (finished) return;
      if (!progress && poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) {
        failed("poll");
      }
    }
  }
};

// The caller's thread moves the first lane. A failure on another lane is thrown by move().
class ThreadedLanes : public LaneEnd {
 public:
  explicit ThreadedLanes(std::vector<int> sockets)
      : LaneEnd(std::move(sockets)), together_(static_cast<std::ptrdiff_t>(count())) {
    failures_.resize(count());
    for (size_t lane = 1; lane < count(); ++lane) {
      threads_.emplace_back([this, lane] {
        for (;;) {
          together_.arrive_and_wait();
          if (ending_) return;
          move_lane(lane);
          together_.arrive_and_wait();
        }
      });
    }
  }

  ~ThreadedLanes() override {
    ending_ = true;
    together_.arrive_and_wait();
  }

  void move(Direction direction, Part buffer) override {
    direction_ = direction;
    buffer_ = buffer;
    together_.arrive_and_wait();
    move_lane(0);
    together_.arrive_and_wait();
    for (const std::exception_ptr& failure : failures_) {
      if (failure) std::rethrow_exception(failure);
    }
  }

 private:
  void move_lane(size_t lane) {
    try {
      move_whole(socket(lane), direction_, part_of(buffer_, lane));
    } catch (...) {
      failures_[lane] = std::current_exception();
    }
  }

  std::barrier<> together_;
  // Written by the caller, between the barriers at the end and at the start.
  Direction direction_{};
  Part buffer_;
  bool ending_ = false;
  std::vector<std::exception_ptr> failures_;  // each by its lane
  std::vector<std::jthread> threads_;
};

std::unique_ptr<LaneEnd> made(std::vector<int> sockets, LaneMode mode) {
  if (mode == LaneMode::kPoll) return std::make_unique<PolledLanes>(std::move(sockets));
  return std::make_unique<ThreadedLanes>(std::move(sockets));
}

}  // namespace

Lanes::Lanes(std::vector<int> sockets, std::span<std::byte> buffer, LaneMode mode)
    : buffer_(buffer), end_(made(std::move(sockets), mode)) {}
Lanes::~Lanes() = default;

void Lanes::read() { end_->read(buffer_); }

void Lanes::write() { end_->write(buffer_); }

void Lanes::serve() {
  while (end_->answer(buffer_)) {
  }
}

}  // namespace hbm::bench
