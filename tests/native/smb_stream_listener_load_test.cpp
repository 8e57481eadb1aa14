// A stream listener with many clients, with greedy clients, and with slow clients.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

#include "smb_listener_fixture.h"

namespace hbm::box::server::listener {
namespace {

// Returns the number of silent clients that the limits allow. Each client takes two descriptors of
// this process.
size_t silent_clients() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return std::min<size_t>(10'000, limit.rlim_max > 2000 ? limit.rlim_max - 1500 : 500);
}

TEST(StreamListener, ServesOthersWhileThousandsAreSilent) {
  Box box;  // the listener has raised the limit of descriptors
  const size_t count = silent_clients();
  const auto good = joined(box.tcp());
  std::vector<Descriptor> silent;
  silent.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    silent.push_back(protocol::connect_to(box.tcp(), soon()));
    if (i % 100 != 0) continue;
    const auto reply = good->ask(Opcode::kRead, bytes_of(transfer_of(0, 4096)));
    ASSERT_EQ(reply.header.status, Status::kOk);
    if (i % 1000 == 0) expect_served(box);
  }
  EXPECT_EQ(box.handler.left_again, static_cast<int>((count + 999) / 1000));
}

TEST(StreamListener, ContinuesWhenDescriptorsRunOut) {
  Box box;
  const auto good = joined(box.tcp());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  std::vector<Descriptor> fillers;
  const rlimit few{100, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  for (;;) {
    Descriptor filler(dup(0));
    if (!filler) break;
    fillers.push_back(std::move(filler));
  }
  fillers.pop_back();  // one descriptor for this end of the connection, none for the listener's end
  Descriptor waiting = protocol::connect_to(box.tcp(), soon());
  // Check for spinning repeatedly: other threads of this process may work for a short time.
  EXPECT_TRUE(eventually([] {
    const clock_t begin = clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return clock() - begin < CLOCKS_PER_SEC / 10;
  }));
  EXPECT_EQ(good->ask(Opcode::kPing).header.status, Status::kOk);
  fillers.clear();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(protocol::wait_for(waiting.get(), POLLIN, soon()));  // the Hello of the box
  expect_served(box);
}

TEST(StreamListener, StopsReadingUntilRepliesAreTaken) {
  StreamListenerOptions options = options_with();
  options.threads = 1;
  Box box(options);
  const auto slow = joined(box.tcp());
  const auto other = joined(box.tcp());
  const auto transfer = transfer_of(0, protocol::kMaxPayload);
  constexpr int kCount = 100;
  for (int i = 0; i < kCount; ++i) slow->queue(Opcode::kRead, bytes_of(transfer));
  slow->flush();
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(other->ask(Opcode::kRead, bytes_of(transfer)).payload.size(), protocol::kMaxPayload);
  }
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(slow->next().payload.size(), protocol::kMaxPayload) << i;
  }
}

// At any time, 3 * kAhead requests of greedy clients wait. A modest client overtakes most of them.
// The box counts the requests, because this thread may wait for a processor after its reply has
// arrived. A correct box fails only if this thread loses its processor between the count and the
// request in half of the 50 turns. If that happens in one turn of ten, the chance of a failure is
// 1e-11.
TEST(StreamListener, StarvesNoClient) {
  StreamListenerOptions options = options_with();
  options.threads = 1;
  Box box(options);
  constexpr int kGreedy = 3, kAhead = 16;
  std::atomic<bool> stop{false};
  std::atomic<int> served{0};
  std::vector<std::thread> greedy;
  for (int i = 0; i < kGreedy; ++i) {
    greedy.emplace_back([&box, &stop, &served] {
      const auto client = joined(box.tcp());
      const auto transfer = transfer_of(0, protocol::kMaxPayload);
      for (int k = 0; k < kAhead; ++k) client->queue(Opcode::kRead, bytes_of(transfer));
      client->flush();
      while (!stop) {
        client->next();
        ++served;
        client->send(Opcode::kRead, bytes_of(transfer));
      }
    });
  }
  ASSERT_TRUE(eventually([&served] { return served >= kGreedy * kAhead; }));
  const auto modest = joined(box.tcp());
  std::vector<int> overtaken_by;
  for (int i = 0; i < 50; ++i) {
    const int before = box.handler.accesses;
    ASSERT_EQ(modest->ask(Opcode::kRead, bytes_of(transfer_of(0, 4096))).payload.size(), 4096U);
    overtaken_by.push_back(box.handler.last_short - before - 1);
  }
  stop = true;
  for (std::thread& thread : greedy) thread.join();
  std::ranges::sort(overtaken_by);
  RecordProperty("median", overtaken_by[overtaken_by.size() / 2]);
  EXPECT_LT(overtaken_by[overtaken_by.size() / 2], kGreedy * kAhead / 2);
}

}  // namespace
}  // namespace hbm::box::server::listener
