// Sessions: sequence numbers and replays, leases, fairness, and the replies of a closing box.
#include "box/server/session.h"

#include <gtest/gtest.h>
#include <functional>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <utility>

#include "box/server/request_handler.h"
#include "box/server/sessions.h"
#include "box/server/tuning.h"
#include "smb_service_fixture.h"
#include "stress.h"

namespace hbm::box::server {
namespace {

using protocol::Opcode;
using protocol::Status;

constexpr uint64_t kSize = 1 << 16;
constexpr protocol::Id kKey{3, 4};

TEST(Session, RepeatedRequestsAreAnsweredWithoutReexecution) {
  Box box;
  Caller caller(box);
  const protocol::Alloc alloc = caller.alloc_request(kSize, {}, protocol::AllocMode::kCreate);
  const Reply made = caller.call(Opcode::kAlloc, bytes_of(alloc));
  const Reply again = caller.call(Opcode::kAlloc, bytes_of(alloc));
  EXPECT_EQ(again.body, made.body);
  EXPECT_EQ(again.granted, made.granted);
  EXPECT_EQ(again.may_write, made.may_write);
  EXPECT_EQ(box.service->statistics().totals.segments, 1u);

  const protocol::FetchAdd add = caller.fetch_add_request(1, 0, 5);
  EXPECT_EQ(as<protocol::Fetched>(caller.fetch_add(add)).before, 0);
  EXPECT_EQ(as<protocol::Fetched>(caller.fetch_add(add)).before, 0);
  EXPECT_EQ(caller.memory<int64_t>(1)[0], 5);

  const protocol::Accumulate sum = caller.accumulate_request(1, 1, 8, 1, Dtype::kInt64);
  EXPECT_EQ(caller.accumulate(sum).status, Status::kOk);
  EXPECT_EQ(caller.accumulate(sum).status, Status::kOk);
  EXPECT_EQ(caller.memory<int64_t>(1)[0], 10);

  const protocol::FetchAdd wrong = caller.fetch_add_request(1, 4, 5);
  const Reply refusal = caller.fetch_add(wrong);
  EXPECT_EQ(refusal.status, Status::kRange);
  EXPECT_EQ(caller.fetch_add(wrong).cause, refusal.cause);
  EXPECT_EQ(caller.fetch_add(1, 0, 1).status, Status::kOk);
}

TEST(Session, InvalidNumbersAreRefused) {
  Box box;
  Caller caller(box);
  caller.alloc(kSize);
  const auto add = [&](uint64_t number, uint64_t answered) {
    return caller.fetch_add({{number, answered}, 0, 1, 1, 0}).status;
  };
  EXPECT_EQ(add(0, 0), Status::kMalformed);
  EXPECT_EQ(add(3, 1), Status::kMalformed);  // request 2 is missing
  EXPECT_EQ(add(2, 2), Status::kMalformed);  // confirms its own reply
  EXPECT_EQ(add(2, 0), Status::kOk);
  EXPECT_EQ(add(3, 2), Status::kOk);
  EXPECT_EQ(add(2, 0), Status::kMalformed);  // request 3 confirmed the reply
  EXPECT_EQ(add(3, 2), Status::kOk);         // sent again
  EXPECT_EQ(caller.memory<int64_t>(1)[0], 2);
}

TEST(Session, CachesAsManyRepliesAsAClientMayLeaveUnconfirmed) {
  Box box;
  Caller caller(box);
  caller.alloc(kSize);
  const auto add = [&](uint64_t number) { return caller.fetch_add({{number, 1}, 0, 1, 1, 0}); };
  const uint64_t last = 1 + protocol::kSequencedInFlight;
  for (uint64_t number = 2; number <= last; ++number) EXPECT_EQ(add(number).status, Status::kOk);
  EXPECT_EQ(add(last + 1).status, Status::kMalformed);
  for (uint64_t number = 2; number <= last; ++number) {
    EXPECT_EQ(as<protocol::Fetched>(add(number)).before, static_cast<int64_t>(number - 2));
  }
}

TEST(Session, KeepsAttachmentsAfterAReconnect) {
  Box box;
  auto first = std::make_unique<Caller>(box);
  first->alloc(kSize, kKey);
  first->memory<int>(1)[0] = 9;
  const protocol::Id id = first->joining.id;
  Caller further(box, protocol::Join::kFurtherConnection, id);
  EXPECT_TRUE(further.joining.resumed);
  first.reset();
  Caller back(box, 0, id);
  EXPECT_EQ(back.joining.status, Status::kOk);
  EXPECT_TRUE(back.joining.resumed);
  EXPECT_EQ(back.joining.applied, 1u);
  EXPECT_EQ(back.memory<int>(1)[0], 9);
  EXPECT_EQ(as<protocol::Allocated>(back.attach(1, kKey, kSize)).key, kKey);
  EXPECT_EQ(back.attach(1, {9, 9}, kSize).status, Status::kMalformed);
  EXPECT_EQ(box.service->statistics().segments.front().attachments, 1u);
  EXPECT_EQ(box.service->statistics().clients.front().connected, 2u);
}

TEST(Session, InvalidJoinsAreRefused) {
  BoxOptions options;
  options.service.most_clients = 2;
  Box box(options);
  EXPECT_EQ(Caller(box, 0, {5, 5}).joining.status, Status::kExpired);
  EXPECT_EQ(Caller(box, protocol::Join::kFurtherConnection).joining.status, Status::kMalformed);
  EXPECT_EQ(Caller(box, 128).joining.status, Status::kMalformed);
  Caller reader(box, protocol::Join::kReadOnlyClient);
  EXPECT_EQ(Caller(box, protocol::Join::kFurtherConnection, reader.joining.id).joining.status,
            Status::kMalformed);
  auto second = std::make_unique<Caller>(box);
  EXPECT_EQ(Caller(box).joining.status, Status::kExhausted);
  second->call(Opcode::kLeave);
  second.reset();
  EXPECT_TRUE(eventually([&] { return Caller(box).joining.status == Status::kOk; }));
}

constexpr std::chrono::milliseconds kLease{500};

// keeps() makes `call`. It returns true if less than half a lease has passed since the call before,
// so that the session must live. A busy machine can pause a test for longer.
class Pace {
 public:
  bool keeps(const std::function<void()>& call) {
    call();
    const Clock::time_point now = Clock::now();
    return now - std::exchange(last_, now) < kLease / 2;
  }

 private:
  Clock::time_point last_ = Clock::now();
};

TEST(Session, EndsWithItsLease) {
  BoxOptions options;
  options.service.lease = kLease;
  for (bool in_time = false; !in_time;) {
    Box box(options);
    Caller gone(box), alive(box);
    Pace pace;
    in_time = true;
    const auto start = Clock::now();
    gone.alloc(kSize, kKey, protocol::AllocMode::kAuto, protocol::Alloc::kTemporary);
    ASSERT_TRUE(eventually([&] {
      in_time = pace.keeps([&] { alive.call(Opcode::kPing); }) && in_time;
      return !in_time || box.service->statistics().totals.clients == 1;
    }));
    if (!in_time) continue;
    EXPECT_GE(Clock::now() - start, kLease - 10ms);
    EXPECT_EQ(gone.call(Opcode::kPing).status, Status::kExpired);
    EXPECT_EQ(gone.access(1, 0, 1).status, Status::kExpired);
    EXPECT_EQ(Caller(box, 0, gone.joining.id).joining.status, Status::kExpired);
    Status last{};
    in_time = pace.keeps([&] { last = alive.call(Opcode::kPing).status; });
    if (!in_time) continue;
    EXPECT_EQ(last, Status::kOk);
    EXPECT_EQ(box.service->statistics().totals.segments, 0u);
  }
}

TEST(Session, TimerRetriesToEndASession) {
  const auto records = storage::Records::in_memory({.sessions = 4});
  std::atomic<int> tries{0};
  Sessions sessions({.lease = 20ms,
                     .most = 4,
                     .expired =
                         [&tries](const std::shared_ptr<Session>& session) {
                           if (++tries == 1) throw std::bad_alloc();
                           session->push({Opcode::kLeave, {}, [](const Reply&) {}});
                         },
                     .settled = [] {}},
                    *records);
  ASSERT_EQ(sessions.join({}, protocol::TransportKind::kTcp, "").status, Status::kOk);
  EXPECT_TRUE(eventually([&] { return sessions.all().front()->ended(); }));
  EXPECT_EQ(tries, 2);
}

// HBM_STRESS_SECONDS=600 runs for ten minutes.
TEST(Session, LeavingWhileTheLeaseEnds) {
  BoxOptions options;
  options.service.lease = 2ms;
  Box box(options);
  const int seconds = stress("HBM_STRESS_SECONDS", 0);
  const auto until = Clock::now() + (seconds > 0 ? seconds * 1000ms : 300ms);
  for (int i = 0; Clock::now() < until; ++i) {
    Caller caller(box);
    const Clock::time_point leaves = Clock::now() + 1990us + i % 40 * 1us;
    while (Clock::now() < leaves) continue;
    const Status left = caller.call(Opcode::kLeave).status;
    EXPECT_TRUE(left == Status::kOk || left == Status::kExpired);
  }
}

TEST(Session, SlicesRenewTheLease) {
  BoxOptions options;
  options.service.lease = kLease;
  for (bool in_time = false; !in_time;) {
    Box box(options);
    Caller caller(box);
    caller.alloc(kSize);
    Pace pace;
    in_time = true;
    for (const auto until = Clock::now() + 2 * kLease + 200ms; in_time && Clock::now() < until;) {
      Status status{};
      in_time = pace.keeps([&] { status = caller.access(1, 0, 8).status; });
      if (in_time) {
        ASSERT_EQ(status, Status::kOk);
      }
      std::this_thread::sleep_for(20ms);
    }
  }
}

TEST(Session, SumsOfManyAreExact) {
  BoxOptions options;
  options.service.handlers = 4;
  Box box(options);
  constexpr int kClients = 8, kTimes = 40;
  constexpr uint64_t kCount = 100'000;
  Caller reader(box);
  ASSERT_EQ(reader.alloc(kCount * sizeof(float), kKey).status, Status::kOk);
  std::vector<std::thread> threads;
  for (int client = 0; client < kClients; ++client) {
    threads.emplace_back([&box, client] {
      Caller caller(box);
      caller.alloc(kCount * sizeof(float), kKey);
      caller.alloc(kCount * sizeof(float));
      std::fill_n(caller.memory<float>(2), kCount, static_cast<float>(client + 1));
      for (int i = 0; i < kTimes; ++i) {
        ASSERT_EQ(caller.accumulate(1, 2, kCount * sizeof(float), 2).status, Status::kOk);
      }
      caller.call(Opcode::kLeave);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const float* sum = reader.memory<float>(1);
  const float expected = 2.0f * kTimes * kClients * (kClients + 1) / 2;
  EXPECT_EQ(std::count(sum, sum + kCount, expected), static_cast<ptrdiff_t>(kCount));
}

TEST(Session, RequestsOfOneClientRunInOrder) {
  BoxOptions options;
  options.service.handlers = 4;
  Box box(options);
  Caller caller(box);
  caller.alloc(kSize);
  std::vector<std::future<Reply>> replies;
  for (uint64_t i = 0; i < protocol::kSequencedInFlight; ++i) {
    const protocol::FetchAdd add{{2 + i, 1}, 0, 1, 1, 0};
    replies.push_back(caller.start(Opcode::kFetchAdd, bytes_of(add)));
  }
  for (size_t i = 0; i < replies.size(); ++i) {
    EXPECT_EQ(as<protocol::Fetched>(replies[i].get()).before, static_cast<int64_t>(i));
  }
}

// Keeps a box's only handler thread busy until this object is destroyed.
class HeldUp {
 public:
  HeldUp(Box& box, const Caller& caller) {
    box.service->submit(caller.joining.session, Opcode::kPing, {},
                        [gate = gate_.get_future().share()](const Reply&) { gate.wait(); });
  }
  ~HeldUp() { gate_.set_value(); }

 private:
  std::promise<void> gate_;
};

TEST(Session, ALongQueueDelaysNoOtherClient) {
  BoxOptions options;
  options.service.handlers = 1;
  Box box(options);
  Caller busy(box), patient(box);
  std::atomic<int> done{0}, done_before{-1};
  {
    const HeldUp held(box, busy);
    for (int i = 0; i < 1000; ++i) {
      box.service->submit(busy.joining.session, Opcode::kPing, {},
                          [&done](const Reply&) { ++done; });
    }
    box.service->submit(patient.joining.session, Opcode::kPing, {},
                        [&](const Reply&) { done_before = done.load(); });
  }
  EXPECT_TRUE(eventually([&] { return done == 1000; }));
  EXPECT_EQ(done_before, 0);
}

TEST(Session, TooManyRequestsAreRefused) {
  BoxOptions options;
  options.service.handlers = 1;
  Box box(options);
  Caller busy(box), caller(box);
  auto held = std::make_unique<HeldUp>(box, busy);
  std::vector<std::future<Reply>> replies;
  for (size_t i = 0; i <= kMostRequestsPerSession; ++i) {
    replies.push_back(caller.start(Opcode::kPing, {}));
  }
  EXPECT_EQ(replies.back().get().status, Status::kExhausted);
  held.reset();
  EXPECT_EQ(replies.front().get().status, Status::kOk);
}

TEST(Session, ClosingBoxAnswersAllRequests) {
  Box box;
  std::vector<std::unique_ptr<Caller>> callers;
  for (int i = 0; i < 4; ++i) callers.push_back(std::make_unique<Caller>(box));
  std::atomic<bool> stop{false};
  std::atomic<int> asked{0}, answered{0};
  std::vector<std::thread> threads;
  for (auto& caller : callers) {
    threads.emplace_back([&, session = caller->joining.session] {
      while (!stop) {
        ++asked;
        box.service->submit(session, Opcode::kPing, {}, [&](const Reply&) { ++answered; });
        if (asked - answered > 64) std::this_thread::yield();
      }
    });
  }
  std::this_thread::sleep_for(20ms);
  box.service->close();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return asked == answered; }));
  EXPECT_EQ(callers.front()->call(Opcode::kPing).status, Status::kClosing);
  EXPECT_EQ(callers.front()->access(1, 0, 1).status, Status::kClosing);
  EXPECT_EQ(Caller(box).joining.status, Status::kClosing);
}

}  // namespace
}  // namespace hbm::box::server
