// A relay between a client and a box. It forwards everything, and changes the records of one
// direction.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "box/protocol/authenticator.h"
#include "box/protocol/protocol.h"
#include "box/protocol/socket.h"
#include "smb_socket_pairs.h"

namespace hbm::box {

class Relay {
 public:
  enum class Direction { kToBox, kToClient };

  // Returns the records to forward instead of `record`. `number` counts the records of the
  // direction from 0, without the frames of the join. A thread of the relay calls it.
  using Change = std::function<std::vector<Bytes>(uint64_t number, const Bytes& record)>;

  // `change` gets records if `authenticated` is true, and frames otherwise.
  Relay(uint16_t box_port, Direction direction, Change change, bool authenticated = true)
      : box_port_(box_port),
        direction_(direction),
        change_(std::move(change)),
        authenticated_(authenticated),
        listener_(protocol::listen_at({"127.0.0.1", 0, ""})),
        acceptor_([this] { accept_clients(); }) {}

  ~Relay() {
    stopping_ = true;
    ::shutdown(listener_.get(), SHUT_RDWR);
    acceptor_.join();
    for (Connection& one : connections_) {
      ::shutdown(one.client.get(), SHUT_RDWR);
      ::shutdown(one.box.get(), SHUT_RDWR);
      one.up.join();
      one.down.join();
    }
  }

  uint16_t port() const { return protocol::local_port(listener_.get()); }

 private:
  struct Connection {
    Descriptor client;
    Descriptor box;
    std::thread up;
    std::thread down;
  };

  static protocol::Deadline soon() {
    return std::chrono::steady_clock::now() + std::chrono::seconds(60);
  }

  void accept_clients() {
    while (!stopping_ &&
           protocol::wait_for(listener_.get(), POLLIN, soon() + std::chrono::hours(1))) {
      int failure = 0;
      Descriptor client = protocol::accept_from(listener_.get(), failure);
      if (!client) continue;
      Connection& one = connections_.emplace_back();
      one.client = std::move(client);
      one.box = protocol::connect_to({"127.0.0.1", box_port_, ""}, soon());
      for (const int socket : {one.client.get(), one.box.get()}) {
        fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
      }
      const int client_socket = one.client.get();
      const int box_socket = one.box.get();
      one.up = std::thread([=, this] { pass(client_socket, box_socket, Direction::kToBox); });
      one.down = std::thread([=, this] { pass(box_socket, client_socket, Direction::kToClient); });
    }
  }

  void pass(int from, int to, Direction direction) const {
    if (direction == direction_) {
      // Passes on the first frames unchanged: the Join to the box, the Hello and the Joined to the
      // client.
      bool on = pass_frame(from, to);
      if (on && direction == Direction::kToClient) on = pass_frame(from, to);
      for (uint64_t number = 0; on; ++number) {
        const Bytes record = authenticated_ ? record_from(from) : frame_from(from);
        on = !record.empty();
        if (!on) break;
        for (const Bytes& instead : change_(number, record)) on = on && send_all(to, instead);
      }
    } else {
      Bytes some(1 << 16);
      for (ssize_t got = 1; got > 0;) {
        got = recv(from, some.data(), some.size(), 0);
        if (got > 0 && !send_all(to, {some.begin(), some.begin() + got})) break;
      }
    }
    ::shutdown(to, SHUT_WR);
  }

  static bool pass_frame(int from, int to) {
    const Bytes frame = frame_from(from);
    return !frame.empty() && send_all(to, frame);
  }

  static Bytes frame_from(int from) {
    protocol::Header header;
    Bytes frame(sizeof(header));
    if (!receive_all(from, frame.data(), frame.size())) return {};
    std::memcpy(&header, frame.data(), sizeof(header));
    return rest_of(from, std::move(frame), header.body_bytes + header.payload_bytes);
  }

  static Bytes record_from(int from) {
    protocol::RecordHeader header;
    Bytes record(sizeof(header));
    if (!receive_all(from, record.data(), record.size())) return {};
    std::memcpy(&header, record.data(), sizeof(header));
    return rest_of(from, std::move(record), header.bytes + sizeof(protocol::Tag));
  }

  static Bytes rest_of(int from, Bytes begun, size_t bytes) {
    const size_t before = begun.size();
    begun.resize(before + bytes);
    return receive_all(from, begun.data() + before, bytes) ? begun : Bytes{};
  }

  static bool receive_all(int from, std::byte* to, size_t bytes) {
    return bytes == 0 || recv(from, to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
  }

  static bool send_all(int to, const Bytes& bytes) {
    return send(to, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  const uint16_t box_port_;
  const Direction direction_;
  const Change change_;
  const bool authenticated_;
  const Descriptor listener_;
  std::atomic<bool> stopping_{false};
  std::list<Connection> connections_;
  std::thread acceptor_;
};

}  // namespace hbm::box
