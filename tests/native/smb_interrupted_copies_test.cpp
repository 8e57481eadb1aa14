// Signals interrupt a client of the transport shm while it copies.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "smb_conformance_fixture.h"

namespace hbm::box::client {
namespace {

// Signals interrupt a thread while it copies. The signals' handler checks or changes the shared
// memory. The copies begin and end at all offsets in a cache line, because memcpy() chooses its
// instructions by these offsets.
class InterruptedCopies : public testing::Test {
 protected:
  static constexpr size_t kElements = 16384;
  static constexpr size_t kBytes = kElements * sizeof(uint64_t);
  static constexpr size_t kOffsets = 8;  // for each end of a copy; a cache line has 8 elements
  static constexpr int kInterrupts = 300;

  InterruptedCopies() {
    box::ServerOptions server_options;
    server_options.listen = {"127.0.0.1:0"};
    server_options.memory = uint64_t{64} << 20;
    server_.emplace(server_options);
    ClientOptions options;
    options.url = server_->url();
    options.transport = parse_transport("shm");
    client_.emplace(options);
    segment_.emplace(client_->alloc({.size = kBytes + kOffsets * sizeof(uint64_t)}));
    memory_ = segment_->memory();
    shared = {reinterpret_cast<uint64_t*>(memory_.get()), kElements + kOffsets};
  }

  static uint64_t offset(int turn) { return turn / 2 % kOffsets * sizeof(uint64_t); }
  static uint64_t local_offset(int turn) { return turn / 16 % kOffsets * sizeof(uint64_t); }

  struct Page {
    alignas(4096) std::array<uint64_t, 512> elements;
  };
  // Returns local memory for a copy at any offset.
  static std::vector<Page> pages(uint64_t value) {
    std::vector<Page> memory(kElements / 512 + 1);
    for (Page& page : memory) page.elements.fill(value);
    return memory;
  }

  static ptrdiff_t torn_of(std::span<const uint64_t> elements) {
    return std::ranges::count_if(elements, [](uint64_t v) { return v != 0 && v != ~uint64_t{0}; });
  }

  // Repeats `copy` until `handler` has interrupted it kInterrupts times.
  static void interrupt(void (*handler)(int), const std::function<void(int turn)>& copy) {
    interrupts = 0;
    struct sigaction action{};
    action.sa_handler = handler;
    struct sigaction before{};
    ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
    std::atomic<bool> done{false};
    std::thread copying([&] {
      for (int turn = 0; interrupts.load() < kInterrupts; ++turn) copy(turn);
      done = true;
    });
    while (!done) {
      pthread_kill(copying.native_handle(), SIGUSR1);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    copying.join();
    sigaction(SIGUSR1, &before, nullptr);
  }

  static inline std::span<uint64_t> shared;
  static inline std::atomic<int> interrupts{0};
  static inline std::atomic<ptrdiff_t> torn{0};

  std::optional<box::Server> server_;
  std::optional<Client> client_;
  std::optional<Segment> segment_;
  std::shared_ptr<std::byte> memory_;
};

TEST_F(InterruptedCopies, WritesLeaveNoTornElement) {
  std::vector<Page> patterns[2] = {pages(0), pages(~uint64_t{0})};
  torn = 0;
  interrupt(
      [](int) {
        torn += torn_of(shared);
        ++interrupts;
      },
      [&](int turn) {
        const std::byte* const local = bytes_of(patterns[turn % 2]) + local_offset(turn);
        client_->write(*segment_, offset(turn), local, kBytes);
      });
  EXPECT_EQ(torn, 0);
}

TEST_F(InterruptedCopies, ReadsTakeNoTornElement) {
  std::vector<Page> back = pages(0);
  ptrdiff_t taken = 0;
  interrupt(
      [](int) {
        const uint64_t inverse = ~shared[0];
        std::ranges::fill(shared, inverse);
        ++interrupts;
      },
      [&](int turn) {
        client_->read(*segment_, offset(turn), bytes_of(back) + local_offset(turn), kBytes);
        for (const Page& page : back) taken += torn_of(page.elements);
      });
  EXPECT_EQ(taken, 0);
}

}  // namespace
}  // namespace hbm::box::client
