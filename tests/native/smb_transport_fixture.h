// A box of one listener in the test's process, and requests to it over a transport.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/boot_id.h"
#include "box/protocol/address.h"
#include "box/protocol/protocol.h"
#include "box/server/listener/stream_listener.h"
#include "box/transport/transport.h"
#include "scratch.h"
#include "seeds.h"
#include "smb_transport_handler.h"

namespace hbm::box {

using namespace std::chrono_literals;
using protocol::Opcode;
using protocol::Status;
using protocol::TransportKind;

inline constexpr char kToken[] = "a token of the test";

template <protocol::Body T>
std::vector<std::byte> bytes_of(const T& value) {
  const auto* const first = reinterpret_cast<const std::byte*>(&value);
  return {first, first + sizeof(value)};
}

inline std::vector<std::byte> random_bytes(uint64_t count) {
  std::mt19937_64 random = test_random();
  std::vector<uint64_t> words(count / sizeof(uint64_t) + 1);
  std::generate(words.begin(), words.end(), std::ref(random));
  const auto* const first = reinterpret_cast<const std::byte*>(words.data());
  return {first, first + count};
}

inline bool same(const std::vector<std::byte>& data, const std::byte* other) {
  return data.empty() || std::memcmp(data.data(), other, data.size()) == 0;
}

// A box of one listener in this process.
class Box {
 public:
  explicit Box(const std::string& token = kToken, bool seal = true) {
    static const Scratch directory("/tmp");
    static std::atomic<int> count{0};
    server::listener::StreamListenerOptions options;
    options.listen = {protocol::parse_host_and_port("127.0.0.1:0")};
    options.socket_path = directory / std::to_string(count.fetch_add(1));
    options.token = token;
    options.seal = seal;
    options.boot_id = boot_id();
    path_ = options.socket_path;
    listener_ = std::make_unique<server::listener::StreamListener>(handler, options);
    port_ = listener_->addresses().front().port;
  }

  transport::TransportOptions opening(uint32_t connections = 4) const {
    transport::TransportOptions opening;
    opening.host = "127.0.0.1";
    opening.port = port_;
    opening.path = path_;
    opening.token = kToken;
    opening.connections = connections;
    return opening;
  }

  void die() { listener_.reset(); }

  TransportHandler handler;

 private:
  std::string path_;
  uint16_t port_ = 0;
  std::unique_ptr<server::listener::StreamListener> listener_;
};

inline void finish(transport::Transport& transport, const transport::TransportRequest& request) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (!request.finished()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "not finished";
    transport.progress(1s);
  }
}

inline std::unique_ptr<transport::TransportRequest> make_request(Opcode opcode,
                                                                 std::vector<std::byte> body = {}) {
  auto request = std::make_unique<transport::TransportRequest>();
  request->opcode = opcode;
  request->body = std::move(body);
  return request;
}

inline std::unique_ptr<transport::TransportRequest> fetch_add(int64_t addend) {
  protocol::FetchAdd asked{};
  asked.addend = addend;
  return make_request(Opcode::kFetchAdd, bytes_of(asked));
}

inline int64_t fetched(const transport::TransportRequest& request) {
  protocol::Fetched fetched{};
  EXPECT_EQ(request.reply.size(), sizeof(fetched));
  std::memcpy(&fetched, request.reply.data(), std::min(request.reply.size(), sizeof(fetched)));
  return fetched.before;
}

inline std::unique_ptr<transport::TransportRequest> transfer(Opcode opcode,
                                                             const transport::Grant& grant,
                                                             uint64_t offset,
                                                             std::span<std::byte> local) {
  auto request = std::make_unique<transport::TransportRequest>();
  request->opcode = opcode;
  request->grant = &grant;
  request->offset = offset;
  request->local = local.data();
  request->bytes = local.size();
  return request;
}

inline std::shared_ptr<transport::Grant> alloc(transport::Transport& transport, uint32_t handle,
                                               uint64_t size, uint32_t flags = 0) {
  protocol::Alloc asked{};
  asked.sequence.number = handle;
  asked.size = size;
  asked.handle = handle;
  asked.flags = flags;
  const auto request = make_request(Opcode::kAlloc, bytes_of(asked));
  transport.post(*request);
  finish(transport, *request);
  EXPECT_EQ(request->status, Status::kOk) << request->cause;
  return request->granted;
}

inline void move(transport::Transport& transport, Opcode opcode, const transport::Grant& grant,
                 uint64_t offset, std::span<std::byte> local) {
  const auto request = transfer(opcode, grant, offset, local);
  transport.post(*request);
  finish(transport, *request);
  EXPECT_EQ(request->status, Status::kOk) << request->cause;
}

}  // namespace hbm::box
