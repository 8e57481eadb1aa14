#include "base/life_sign.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace hbm {
namespace {

constexpr size_t kSigns = 4;
constexpr std::chrono::seconds kLimit{60};

// Waits until `ready` returns true. Fails the test if that takes too long.
void await(const std::function<bool()>& ready) {
  const auto end = std::chrono::steady_clock::now() + kLimit;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error("it took too long");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Memory that a process shares with its child.
struct Shared {
  std::array<LifeSign, kSigns> signs;
  std::atomic<bool> ready;  // the child has done its first steps
};

class LifeSignTest : public testing::Test {
 protected:
  LifeSignTest() {
    void* const memory =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    shared_ = new (memory) Shared{};
  }
  ~LifeSignTest() override {
    end();
    munmap(shared_, sizeof(Shared));
  }

  // Starts a child process that runs `body` and then sleeps.
  void start(const std::function<void()>& body) {
    child_ = fork();
    if (child_ != 0) return;
    alarm(120);
    body();
    while (true) pause();
  }

  // Declares, in the child, that its keeper has this sign.
  void ready_with(size_t sign) {
    await([&] { return shared_->signs[sign].holder != 0; });
    shared_->ready = true;
  }

  void await_ready() {
    await([this] { return shared_->ready.exchange(false); });
  }

  bool shows_death_of(size_t sign) const { return shows_death(shared_->signs[sign]); }
  void await_death(size_t sign) const {
    await([&] { return shows_death_of(sign); });
  }
  bool lives() const { return waitpid(child_, nullptr, WNOHANG) == 0; }

  void end() {
    if (child_ == 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = 0;
  }

  Shared* shared_ = nullptr;
  pid_t child_ = 0;
};

TEST_F(LifeSignTest, ShowsTheDeathOfAKilledProcess) {
  start([this] {
    put_up(shared_->signs[0]);
    ready_with(0);
  });
  await_ready();
  EXPECT_TRUE(lives());
  EXPECT_FALSE(shows_death_of(0));
  end();
  EXPECT_TRUE(shows_death_of(0));
}

TEST_F(LifeSignTest, ShowsTheDeathOfAProcessThatExits) {
  start([this] {
    put_up(shared_->signs[0]);
    ready_with(0);
    exit(0);
  });
  await_death(0);
}

// The process itself lives on, so its pidfd shows nothing.
TEST_F(LifeSignTest, ShowsTheDeathOfAProcessThatExecutesAnotherProgram) {
  start([this] {
    put_up(shared_->signs[0]);
    ready_with(0);
    execl("/bin/sleep", "sleep", "100", nullptr);
  });
  await_death(0);
  EXPECT_TRUE(lives());
}

TEST_F(LifeSignTest, IsNotMarkedAfterItWasTakenDown) {
  for (size_t down = 0; down < kSigns; ++down) {
    start([this, down] {
      for (LifeSign& sign : shared_->signs) put_up(*new (&sign) LifeSign{});
      await([&] { return shared_->signs[down].holder != 0; });
      take_down(shared_->signs[down]);
      shared_->ready = true;
    });
    await_ready();
    end();
    for (size_t i = 0; i < kSigns; ++i) {
      EXPECT_EQ(shows_death_of(i), i != down) << i << ", without " << down;
    }
  }
}

TEST_F(LifeSignTest, IsThatOfTheParentInAForkedChild) {
  put_up(shared_->signs[0]);
  start([this] {
    take_down(shared_->signs[0]);  // does nothing
    put_up(shared_->signs[1]);
    ready_with(1);
  });
  await_ready();
  end();
  EXPECT_FALSE(shows_death_of(0));
  EXPECT_TRUE(shows_death_of(1));
  await([this] { return shared_->signs[0].holder != 0; });  // the keeper has it
  take_down(shared_->signs[0]);
  EXPECT_EQ(shared_->signs[0].holder, 0);
}

// The kernel reads the list at any moment, also while it changes.
TEST_F(LifeSignTest, ShowsTheDeathWhileOtherSignsComeAndGo) {
  for (int turn = 0; turn < 50; ++turn) {
    start([this] {
      for (LifeSign& sign : shared_->signs) put_up(*new (&sign) LifeSign{});
      ready_with(0);
      while (true) {
        take_down(shared_->signs[2]);
        take_down(shared_->signs[1]);
        put_up(shared_->signs[2]);
        put_up(shared_->signs[1]);
      }
    });
    await_ready();
    std::this_thread::sleep_for(std::chrono::microseconds(20 * turn));
    end();
    EXPECT_TRUE(shows_death_of(0)) << "turn " << turn;
  }
}

}  // namespace
}  // namespace hbm
