// A stream listener with a fake handler behind it, and clients that have joined.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "box/server/listener/stream_listener.h"
#include "scratch.h"
#include "smb_fake_handler.h"
#include "smb_raw_client.h"

namespace hbm::box {

using protocol::Opcode;
using protocol::Status;

inline const std::string kToken = "the token";

inline server::listener::StreamListenerOptions options_with(const std::string& token = kToken) {
  static const Scratch directory("/tmp");
  static std::atomic<int> listeners{0};
  server::listener::StreamListenerOptions options;
  options.listen = {{"127.0.0.1", 0, ""}};
  options.socket_path = directory / std::to_string(listeners++);
  options.token = token;
  options.boot_id = "a-boot-id";
  options.verbs_port = 77;
  options.threads = 2;
  return options;
}

// A listener with a fake handler behind it.
struct Box {
  explicit Box(const server::listener::StreamListenerOptions& given = options_with(),
               FakeHandler::Answers answers = FakeHandler::Answers::kAtOnce)
      : options(given), handler(4 << 20, answers), listener(std::in_place, handler, options) {}

  protocol::Address tcp() const { return listener->addresses().at(0); }
  protocol::Address local() const { return {"", 0, options.socket_path}; }

  const server::listener::StreamListenerOptions options;
  FakeHandler handler;
  std::optional<server::listener::StreamListener> listener;
};

inline std::unique_ptr<RawClient> joined(const protocol::Address& address,
                                         const std::string& token = kToken) {
  auto client = std::make_unique<RawClient>(address);
  EXPECT_EQ(client->join(token).header.status, Status::kOk);
  return client;
}

inline protocol::Transfer transfer_of(uint64_t offset, uint32_t bytes,
                                      uint32_t handle = FakeHandler::kHandle) {
  return {offset, bytes, handle};
}

// Waits until `condition` holds, and then returns true. Returns false after a minute.
inline bool eventually(const std::function<bool()>& condition) {
  for (const auto limit = soon(); std::chrono::steady_clock::now() < limit;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

inline void expect_served(const Box& box) {
  EXPECT_EQ(joined(box.tcp())->ask(Opcode::kPing).header.status, Status::kOk);
}

// A test that runs over the Unix socket and over TCP.
class StreamListenerTest : public testing::TestWithParam<protocol::Address (Box::*)() const> {
 protected:
  protocol::Address address(const Box& box) const { return (box.*GetParam())(); }
};

}  // namespace hbm::box
