// A handler for tests of listeners: one segment in plain memory, under the handle 1. It answers
// requests immediately, or on a thread of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "box/protocol/proof.h"
#include "box/server/request_handler.h"
#include "box/server/storage/segment.h"

namespace hbm::box {

class FakeHandler final : public server::RequestHandler {
 public:
  static constexpr uint32_t kHandle = 1;

  enum class Answers { kAtOnce, kByThread, kNever };

  explicit FakeHandler(uint64_t segment_bytes = 4 << 20, Answers answers = Answers::kAtOnce)
      : memory_(segment_bytes), answers_(answers) {
    segment_->size = segment_bytes;
    if (answers == Answers::kByThread) thread_ = std::thread([this] { answer_all(); });
  }

  ~FakeHandler() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    posted_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  std::vector<std::byte>& memory() { return memory_; }

  // Sets the segment that kAlloc and kAttach grant.
  void grant(std::shared_ptr<server::storage::BoxSegment> segment, bool may_write) {
    granted_ = std::move(segment);
    may_write_ = may_write;
  }

  // Sets the cause with which kDelete is refused.
  void refuse_with(std::string cause) { refusal_ = std::move(cause); }

  std::atomic<int> joined{0};
  std::atomic<int> left_again{0};
  std::atomic<int> submitted{0};
  std::atomic<int> accesses{0};
  std::atomic<int> last_short{0};  // number of the latest access to at most 4 KiB
  std::atomic<bool> sessions_ended{false};
  std::atomic<uint32_t> delay_us{0};  // the thread's pause before each answer

  protocol::Id generation() const override { return {7, 8}; }
  uint32_t lease_ms() const override { return 30'000; }

  server::Joining join(const protocol::Join& join, protocol::TransportKind,
                       const std::string& /*host*/) override {
    server::Joining joining;
    if (join.session == protocol::Id{404, 404}) {
      joining.status = protocol::Status::kExpired;
      joining.cause = "the session is not known";
      return joining;
    }
    ++joined;
    // Listeners only hold the session and call nothing of it, so any object will do.
    const auto session = std::make_shared<std::byte>();
    joining.session = {session, reinterpret_cast<server::Session*>(session.get())};
    joining.id = join.session ? join.session : protocol::random_id();
    joining.resumed = static_cast<bool>(join.session);
    return joining;
  }

  void left(const std::shared_ptr<server::Session>&) override { ++left_again; }

  void submit(const std::shared_ptr<server::Session>&, protocol::Opcode opcode,
              std::span<const std::byte> body, server::Answer answer) override {
    ++submitted;
    server::Reply reply = execute(opcode, body);
    if (answers_ == Answers::kAtOnce) return answer(std::move(reply));
    {
      const std::lock_guard lock(mutex_);
      waiting_.emplace_back(std::move(answer), std::move(reply));
    }
    posted_.notify_one();
  }

  server::Access access(const std::shared_ptr<server::Session>&, const protocol::Transfer& transfer,
                        bool) override {
    server::Access access;
    const int number = ++accesses;
    if (transfer.bytes <= 4096) last_short = number;
    if (transfer.handle != kHandle) {
      access.status = protocol::Status::kNotAttached;
      access.cause = "handle " + std::to_string(transfer.handle) + " is not attached";
    } else if (transfer.offset > memory_.size() ||
               transfer.bytes > memory_.size() - transfer.offset) {
      access.status = protocol::Status::kRange;
    } else {
      access.segment = segment_;
      access.at = memory_.data() + transfer.offset;
    }
    return access;
  }

  void on_new_segment(std::function<void(server::storage::BoxSegment&)>) override {}
  bool ended(const std::shared_ptr<server::Session>&) const override { return sessions_ended; }

 private:
  server::Reply execute(protocol::Opcode opcode, std::span<const std::byte> body) {
    server::Reply reply;
    const auto answer = [&reply](const auto& result) {
      const auto bytes = std::as_bytes(std::span(&result, 1));
      reply.body.assign(bytes.begin(), bytes.end());
    };
    if (opcode == protocol::Opcode::kAlloc || opcode == protocol::Opcode::kAttach) {
      answer(protocol::Allocated{{1, 2}, memory_.size(), 1, 0, 0});
      reply.granted = granted_;
      reply.may_write = may_write_;
    } else if (opcode == protocol::Opcode::kFetchAdd) {
      protocol::FetchAdd request;
      std::memcpy(&request, body.data(), sizeof(request));
      answer(protocol::Fetched{request.addend});
    } else if (opcode == protocol::Opcode::kStats) {
      answer(protocol::StatsQuery{});
      reply.body.clear();
      reply.payload.resize(sizeof(protocol::StatsTotals));
    } else if (opcode == protocol::Opcode::kDelete) {
      reply.status = protocol::Status::kNoSuchKey;
      reply.cause = refusal_;
    }
    return reply;
  }

  void answer_all() {
    std::unique_lock lock(mutex_);
    for (;;) {
      posted_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      auto [answer, reply] = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      answer(std::move(reply));
      answer = nullptr;
      lock.lock();
    }
  }

  std::vector<std::byte> memory_;
  const std::shared_ptr<server::storage::BoxSegment> segment_ =
      std::make_shared<server::storage::BoxSegment>();
  std::shared_ptr<server::storage::BoxSegment> granted_;
  bool may_write_ = false;
  std::string refusal_ = "no such key";

  const Answers answers_;
  std::mutex mutex_;  // guards all below
  std::condition_variable posted_;
  std::deque<std::pair<server::Answer, server::Reply>> waiting_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace hbm::box
