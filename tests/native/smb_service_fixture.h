// A box without listeners, in memory or in a directory, and clients that call the box as listeners
// do.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "box/protocol/protocol.h"
#include "box/server/service.h"
#include "box/server/storage/segment.h"
#include "box/server/storage/store.h"
#include "memory/pool.h"

namespace hbm::box {

using namespace std::chrono_literals;

struct BoxOptions {
  server::ServiceOptions service{};
  uint64_t capacity = 64u << 20;
  std::string store;
};

class Box {
 public:
  explicit Box(BoxOptions options = {}) {
    pool = memory::Pool::create({.policy = memory::Policy::kDdr, .capacity = options.capacity});
    server::storage::StoreOptions opening;
    opening.directory = options.store;
    opening.records.sessions = static_cast<uint32_t>(options.service.most_clients);
    opening.records.operations = options.service.handlers;
    opening.records.parts = options.service.accumulate_threads;
    store = server::storage::Store::open(opening, pool);
    service = std::make_unique<server::Service>(options.service, *store, *pool);
  }

  std::shared_ptr<memory::Pool> pool;
  std::unique_ptr<server::storage::Store> store;
  std::unique_ptr<server::Service> service;
};

template <protocol::Body T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

template <protocol::Body T>
T as(const server::Reply& reply) {
  T value{};
  EXPECT_EQ(reply.body.size(), sizeof value) << reply.cause;
  if (reply.body.size() == sizeof value) std::memcpy(&value, reply.body.data(), sizeof value);
  return value;
}

// One client, with one connection. It numbers its sequenced requests.
class Caller {
 public:
  explicit Caller(Box& box, uint32_t flags = 0, protocol::Id session = {},
                  const std::string& host = "")
      : handler_(*box.service) {
    protocol::Join join{};
    join.session = session;
    join.flags = flags;
    join.pid = 7;
    joining = handler_.join(join, protocol::TransportKind::kTcp, host);
    number_ = joining.applied;
  }
  ~Caller() { disconnect(); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  void disconnect() {
    if (auto session = std::exchange(joining.session, nullptr)) handler_.left(session);
  }

  std::future<server::Reply> start(protocol::Opcode opcode, std::span<const std::byte> body) {
    auto promise = std::make_shared<std::promise<server::Reply>>();
    handler_.submit(joining.session, opcode, body,
                    [promise](server::Reply reply) { promise->set_value(std::move(reply)); });
    return promise->get_future();
  }
  server::Reply call(protocol::Opcode opcode, std::span<const std::byte> body = {}) {
    return start(opcode, body).get();
  }

  // Returns the number of the next request, and the confirmation of all replies so far.
  protocol::Sequence next() {
    ++number_;
    return {number_, number_ - 1};
  }

  protocol::Alloc alloc_request(uint64_t size, protocol::Id key, protocol::AllocMode mode,
                                uint32_t flags = 0) {
    return {.sequence = next(),
            .key = key,
            .size = size,
            .handle = ++handle_,
            .mode = mode,
            .flags = flags,
            .reserved = 0};
  }
  server::Reply alloc(uint64_t size, protocol::Id key = {},
                      protocol::AllocMode mode = protocol::AllocMode::kAuto, uint32_t flags = 0) {
    return call(protocol::Opcode::kAlloc, bytes_of(alloc_request(size, key, mode, flags)));
  }
  server::Reply attach(uint32_t handle, protocol::Id key, uint64_t size, uint32_t flags = 0) {
    return call(protocol::Opcode::kAttach, bytes_of(protocol::Attach{key, size, handle, flags}));
  }
  server::Reply free(uint32_t handle) {
    return call(protocol::Opcode::kFree, bytes_of(protocol::Release{next(), handle, 0}));
  }
  server::Reply remove(uint32_t handle) {
    return call(protocol::Opcode::kDelete, bytes_of(protocol::Release{next(), handle, 0}));
  }

  protocol::Accumulate accumulate_request(uint32_t target, uint32_t source, uint64_t bytes,
                                          double scale = 1, Dtype dtype = Dtype::kFloat32) {
    return {.sequence = next(),
            .target_offset = 0,
            .source_offset = 0,
            .bytes = bytes,
            .scale = scale,
            .target = target,
            .source = source,
            .dtype = static_cast<uint8_t>(dtype),
            .source_dtype = static_cast<uint8_t>(dtype),
            .combine = static_cast<uint8_t>(Combine::kAdd),
            .reserved = {}};
  }
  server::Reply accumulate(uint32_t target, uint32_t source, uint64_t bytes, double scale = 1,
                           Dtype dtype = Dtype::kFloat32) {
    return accumulate(accumulate_request(target, source, bytes, scale, dtype));
  }
  server::Reply accumulate(const protocol::Accumulate& request) {
    return call(protocol::Opcode::kAccumulate, bytes_of(request));
  }

  protocol::FetchAdd fetch_add_request(uint32_t handle, uint64_t offset, int64_t addend) {
    return {next(), offset, addend, handle, 0};
  }
  server::Reply fetch_add(const protocol::FetchAdd& request) {
    return call(protocol::Opcode::kFetchAdd, bytes_of(request));
  }
  server::Reply fetch_add(uint32_t handle, uint64_t offset, int64_t addend) {
    return fetch_add(fetch_add_request(handle, offset, addend));
  }

  server::Access access(uint32_t handle, uint64_t offset, uint32_t bytes, bool writing = false) {
    return handler_.access(joining.session, {offset, bytes, handle}, writing);
  }
  template <class T>
  T* memory(uint32_t handle) {  // the start of the segment's memory
    return reinterpret_cast<T*>(access(handle, 0, 1).at);
  }

  uint32_t handle() const { return handle_; }  // of the last alloc's segment
  server::Joining joining;

 private:
  server::RequestHandler& handler_;
  uint64_t number_ = 0;
  uint32_t handle_ = 0;
};

// Waits until `condition` holds, and then returns true. Returns false after a minute.
template <class Condition>
bool eventually(Condition condition) {
  for (const auto limit = server::Clock::now() + 60s; server::Clock::now() < limit;) {
    if (condition()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

}  // namespace hbm::box
