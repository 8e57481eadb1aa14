// A handler for tests of transports: segments in a pool, replies that are immediate or on demand,
// and trivial sessions.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"
#include "box/server/storage/segment.h"
#include "memory/pool.h"

namespace hbm::box::server {

class Session {};

}  // namespace hbm::box::server

namespace hbm::box {

class TransportHandler final : public server::RequestHandler {
 public:
  static constexpr uint64_t kCapacity = uint64_t{1} << 30;

  TransportHandler() : pool_(memory::Pool::create({memory::Policy::kPreferred, kCapacity})) {}

  protocol::Id generation() const override { return {7, 7}; }
  uint32_t lease_ms() const override { return 30000; }

  server::Joining join(const protocol::Join& join, protocol::TransportKind,
                       const std::string& /*host*/) override {
    const std::lock_guard lock(mutex_);
    ++joins;
    server::Joining joining;
    if (refuse != protocol::Status::kOk) {
      joining.status = refuse;
      joining.cause = "the handler refuses";
      return joining;
    }
    joining.session = std::make_shared<server::Session>();
    joining.id = join.session ? join.session : protocol::Id{1, ++sessions_};
    return joining;
  }

  void left(const std::shared_ptr<server::Session>&) override { ++gone; }

  void submit(const std::shared_ptr<server::Session>&, protocol::Opcode opcode,
              std::span<const std::byte> body, server::Answer answer) override {
    server::Reply reply = answer_to(opcode, body);
    const std::lock_guard lock(mutex_);
    submitted.push_back(opcode);
    if (hold_answers) {
      held_.emplace_back(std::move(answer), std::move(reply));
    } else {
      answer(std::move(reply));
    }
  }

  // Sends the held answers, the latest first. Later answers are not held.
  void answer_held() {
    const std::lock_guard lock(mutex_);
    hold_answers = false;
    while (!held_.empty()) {
      held_.back().first(std::move(held_.back().second));
      held_.pop_back();
    }
  }

  size_t held() {
    const std::lock_guard lock(mutex_);
    return held_.size();
  }

  server::Access access(const std::shared_ptr<server::Session>&, const protocol::Transfer& transfer,
                        bool writing) override {
    ++(writing ? writes : reads);
    const std::lock_guard lock(mutex_);
    server::Access access;
    const auto found = segments_.find(transfer.handle);
    if (found == segments_.end()) {
      access.status = protocol::Status::kNotAttached;
      access.cause = "no such handle";
    } else if (transfer.offset > found->second->size ||
               transfer.bytes > found->second->size - transfer.offset) {
      access.status = protocol::Status::kRange;
      access.cause = "past the end of the segment";
    } else {
      access.segment = found->second;
      access.at = found->second->block->base() + transfer.offset;
    }
    return access;
  }

  void on_new_segment(std::function<void(server::storage::BoxSegment&)>) override {}

  // Returns the segment of a handle, for checks.
  std::shared_ptr<server::storage::BoxSegment> segment(uint32_t handle) {
    const std::lock_guard lock(mutex_);
    return segments_.at(handle);
  }

  std::atomic<int> joins{0};
  std::atomic<int> gone{0};
  std::atomic<uint64_t> reads{0};  // slices
  std::atomic<uint64_t> writes{0};
  protocol::Status refuse = protocol::Status::kOk;
  std::vector<protocol::Opcode> submitted;  // read it while no request is in flight
  std::atomic<bool> hold_answers{false};

 private:
  template <class T>
  static std::vector<std::byte> bytes_of(const T& value) {
    const auto* const first = reinterpret_cast<const std::byte*>(&value);
    return {first, first + sizeof(value)};
  }

  static std::vector<std::byte> totals() {
    protocol::StatsTotals totals{};
    totals.segments = 3;
    return bytes_of(totals);
  }

  server::Reply answer_to(protocol::Opcode opcode, std::span<const std::byte> body) {
    server::Reply reply;
    switch (opcode) {
      case protocol::Opcode::kAlloc:
        return alloc(body);
      case protocol::Opcode::kFetchAdd: {
        protocol::FetchAdd request;
        std::memcpy(&request, body.data(), sizeof(request));
        reply.body = bytes_of(protocol::Fetched{request.addend});
        return reply;
      }
      case protocol::Opcode::kStats:
        reply.payload = totals();
        return reply;
      case protocol::Opcode::kDelete:
        reply.status = protocol::Status::kNotAttached;
        reply.cause = "no such handle";
        return reply;
      default:
        return reply;
    }
  }

  server::Reply alloc(std::span<const std::byte> body) {
    protocol::Alloc request;
    std::memcpy(&request, body.data(), sizeof(request));
    auto segment = std::make_shared<server::storage::BoxSegment>();
    segment->key = {2, request.handle};
    segment->size = request.size;
    segment->block = pool_->allocate(request.size);
    server::Reply reply;
    reply.body = bytes_of(protocol::Allocated{segment->key, request.size, 1, 0, 0});
    reply.granted = segment;
    reply.may_write = (request.flags & protocol::Alloc::kReadOnly) == 0;
    const std::lock_guard lock(mutex_);
    segments_[request.handle] = std::move(segment);
    return reply;
  }

  const std::shared_ptr<memory::Pool> pool_;
  std::mutex mutex_;  // guards all below, and `submitted`
  uint64_t sessions_ = 0;
  std::map<uint32_t, std::shared_ptr<server::storage::BoxSegment>> segments_;
  std::vector<std::pair<server::Answer, server::Reply>> held_;
};

}  // namespace hbm::box
