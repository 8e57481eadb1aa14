// Connected sockets, and transfers over them.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "base/descriptor.h"
#include "box/protocol/protocol.h"
#include "box/protocol/socket.h"

namespace hbm::box {

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&random] { return std::byte(random()); });
  return bytes;
}

inline protocol::Header header_of(uint64_t id, protocol::Opcode opcode = protocol::Opcode::kRead) {
  protocol::Header header;
  header.opcode = opcode;
  header.id = id;
  return header;
}

struct Pair {
  Descriptor left;
  Descriptor right;
};

inline Pair unix_pair() {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

inline Pair tcp_pair() {
  const Descriptor listener = protocol::listen_at({"127.0.0.1", 0, ""});
  Pair pair;
  const protocol::Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  pair.left =
      protocol::connect_to({"127.0.0.1", protocol::local_port(listener.get()), ""}, deadline);
  EXPECT_TRUE(protocol::wait_for(listener.get(), POLLIN, deadline));
  int failure = 0;
  pair.right = protocol::accept_from(listener.get(), failure);
  EXPECT_EQ(failure, 0);
  return pair;
}

}  // namespace hbm::box
