#include "box/client/reconnector.h"

#include <poll.h>

#include <algorithm>
#include <exception>
#include <random>
#include <utility>

#include "base/threads.h"
#include "box/client/tuning.h"

namespace hbm::box::client {
namespace {

constexpr uint64_t kAll = UINT64_MAX;  // as `applied`: every request counts as executed

// Returns between half of `delay` and all of it, so that the clients of a box do not reconnect
// together.
Clock::duration jittered(Clock::duration delay) {
  thread_local std::minstd_rand random{std::random_device{}()};
  return delay / 2 + delay / 2 * std::uniform_int_distribution<>(0, 1000)(random) / 1000;
}

Clock::duration longer(Clock::duration delay) {
  return std::min<Clock::duration>(delay * 2, kLongestReconnectDelay);
}

}  // namespace

struct Reconnector::Renewal {
  std::shared_ptr<Attachment> attachment;
  std::unique_ptr<transport::TransportRequest> request;
};

Reconnector::Reconnector(const ClientOptions& options, Dialer& dialer, RequestTable& table,
                         ProgressEngine& engine)
    : options_(options), dialer_(dialer), table_(table), engine_(engine) {
  transport::OpenedTransport opened = dialer_.dial();
  session_ = opened.joined.session;
  generation_ = opened.joined.generation;
  engine_.replace_transport(std::move(opened.transport),
                            std::chrono::milliseconds(opened.joined.lease_ms));
  const SignalsHeldOff held_off;
  thread_ = std::thread([this] { run(); });
}

void Reconnector::stop() {
  table_.wake_event().signal();
  thread_.join();
}

void Reconnector::run() {
  for (bool on = true; on;) {
    try {
      on = turn();
    } catch (const std::exception& error) {
      {
        const auto lock = table_.lock();
        table_.break_off(error.what());
      }
      std::this_thread::sleep_for(kFirstReconnectDelay);
    }
  }
}

bool Reconnector::turn() {
  auto state = ConnectionStatus::State::kUp;
  bool work = false;
  auto until = Clock::time_point::max();
  {
    const auto lock = table_.lock();
    if (table_.stopping()) return false;
    state = table_.status().state();
    work = table_.has_work();
    if (table_.status().up()) until = std::min(engine_.next_ping(), table_.earliest_deadline());
  }
  if (state == ConnectionStatus::State::kBroken) {
    reconnect();
    return true;
  }
  const auto now = Clock::now();
  if (work || now >= until) {
    if (const ProgressEngine::Hold held = engine_.try_hold()) {
      engine_.step(Clock::time_point::max(), true);
      return true;
    }
    until = now + kHeldEnginePollPeriod;
  }
  sleep(until);
  return true;
}

void Reconnector::sleep(Clock::time_point until) {
  const transport::Transport* const transport = engine_.transport();
  const int liveness = transport != nullptr ? transport->liveness_fd() : -1;
  const bool looks = transport != nullptr && liveness < 0;
  const std::chrono::milliseconds longest =
      looks ? kLivenessPollPeriod : std::chrono::milliseconds(kLongestIdleSleep);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(
      std::max(until - Clock::now(), Clock::duration::zero()));
  protocol::WakeEvent& wake_event = table_.wake_event();
  pollfd watched[] = {{.fd = wake_event.fd(), .events = POLLIN, .revents = 0},
                      {.fd = liveness, .events = POLLRDHUP, .revents = 0}};
  poll(watched, 2, static_cast<int>(std::min(left, longest).count()));
  wake_event.clear();
  const bool closed = watched[1].revents != 0;
  if (closed || (transport != nullptr && !transport->alive())) {
    const auto lock = table_.lock();
    table_.break_off(closed ? "the box closed the connection" : "the box is gone");
  }
}

bool Reconnector::pause(Clock::duration delay) {
  const auto until = Clock::now() + delay;
  while (Clock::now() < until) {
    sleep(until);
    const auto lock = table_.lock();
    if (table_.stopping()) return false;
    table_.expire(Clock::now(), /*transport=*/false);
  }
  return true;
}

void Reconnector::reconnect() {
  const ProgressEngine::Hold held = engine_.hold();
  engine_.drop_transport();
  Clock::duration delay = kFirstReconnectDelay;
  unsigned fruitless = 0;
  {
    const auto lock = table_.lock();
    fruitless = table_.status().fruitless();
  }
  for (unsigned i = 0; i < fruitless && delay < kLongestReconnectDelay; ++i) delay = longer(delay);
  if (fruitless > 0 && !pause(jittered(delay))) return;
  for (;;) {
    Clock::duration left;
    {
      const auto lock = table_.lock();
      if (table_.stopping()) return;
      table_.expire(Clock::now(), /*transport=*/false);
      ConnectionStatus& status = table_.status();
      left = status.broken_at() + options_.reconnect_timeout - Clock::now();
      if (left <= Clock::duration::zero()) {
        status.set_unreachable();
        return engine_.fail_all(BoxError::Cause::kUnreachable, status.outage());
      }
    }
    const auto timeout = std::min(
        std::max(std::chrono::ceil<std::chrono::milliseconds>(left), kShortestConnectTimeout),
        options_.connect_timeout);
    if (try_again(timeout)) return;
    sleep(Clock::now() + jittered(delay));
    delay = longer(delay);
  }
}

bool Reconnector::try_again(std::chrono::milliseconds timeout) {
  std::vector<Renewal> renewals;  // outlives the transport, which may use the requests
  try {
    bool same_session = true;
    transport::OpenedTransport opened;
    try {
      opened = dialer_.dial_again(session_, timeout);
      const auto lock = table_.lock();
      same_session = table_.remembered(opened.joined.applied);
    } catch (const transport::Refused& refused) {
      if (refused.status() != protocol::Status::kExpired) throw;
      same_session = false;
    }
    if (!same_session) opened = dialer_.dial_again({}, timeout);
    if (opened.joined.generation == generation_) {
      attach_again(*opened.transport, same_session ? opened.joined.applied : kAll, renewals);
    }
    resume(opened, renewals, same_session);
    return true;
  } catch (const std::exception& error) {
    const auto lock = table_.lock();
    table_.status().attempt_failed(error.what());
    return false;
  }
}

void Reconnector::attach_again(transport::Transport& transport, uint64_t applied,
                               std::vector<Renewal>& renewals) {
  {
    const auto lock = table_.lock();
    for (auto& attachment : table_.attachments()) {
      renewals.push_back({std::move(attachment), nullptr});
    }
  }
  // Do not restore an attachment with a posted kFree if the box has executed this kFree, or if the
  // last session has ended.
  for (const OperationPointer& operation : engine_.posted()) {
    if (operation->opcode() != protocol::Opcode::kFree || operation->number > applied) continue;
    std::erase_if(renewals, [&](const Renewal& renewal) {
      return renewal.attachment == operation->touches[0].attachment;
    });
  }
  for (Renewal& renewal : renewals) {
    const Attachment& attachment = *renewal.attachment;
    const protocol::Attach body{.key = attachment.key,
                                .size = attachment.size,
                                .handle = attachment.handle,
                                .flags = (attachment.read_only ? protocol::Alloc::kReadOnly : 0) |
                                         (attachment.temporary ? protocol::Alloc::kTemporary : 0)};
    const auto bytes = std::as_bytes(std::span(&body, 1));
    renewal.request = std::make_unique<transport::TransportRequest>();
    renewal.request->opcode = protocol::Opcode::kAttach;
    renewal.request->body.assign(bytes.begin(), bytes.end());
    transport.post(*renewal.request);
  }
  const auto deadline = Clock::now() + kReattachTimeout;
  for (const Renewal& renewal : renewals) {
    while (!renewal.request->finished()) {
      if (Clock::now() > deadline)
        throw transport::Broken("the box does not attach the segments again");
      transport.progress(kClosePollPeriod);
      const auto lock = table_.lock();
      if (table_.stopping()) throw transport::Broken("the client is being closed");
    }
    const protocol::Status status = renewal.request->status;
    if (status == protocol::Status::kExpired || status == protocol::Status::kClosing) {
      throw transport::Broken(renewal.request->cause);
    }
  }
}

void Reconnector::resume(transport::OpenedTransport& opened, std::vector<Renewal>& renewals,
                         bool same_session) {
  Operations again;
  {
    const auto lock = table_.lock();
    const bool same_generation = opened.joined.generation == generation_;
    engine_.replace_transport(std::move(opened.transport),
                              std::chrono::milliseconds(opened.joined.lease_ms));
    session_ = opened.joined.session;
    generation_ = opened.joined.generation;
    for (const Renewal& renewal : renewals) {
      const transport::TransportRequest& request = *renewal.request;
      if (request.status == protocol::Status::kOk) {
        renewal.attachment->grant = request.granted;
      } else {
        table_.lose(*renewal.attachment,
                    "the box at " + dialer_.box() + " came back without it: " + request.cause,
                    /*deleted=*/request.status == protocol::Status::kNoSuchKey);
      }
    }
    if (!same_generation) {
      table_.lose_all("the box at " + dialer_.box() +
                      " restarted without its data, and the segment is gone");
    }
    again = table_.repost(engine_.take_posted(), same_session, same_generation);
    table_.status().restored(same_generation);
  }
  engine_.post_again(again);
}

}  // namespace hbm::box::client
