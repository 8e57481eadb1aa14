// Arrivals wakes a process when data arrive on a connection that an epoll descriptor watches. UCX
// watches its connections by such a descriptor.
#include "communicator/mpi/arrivals.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// An epoll descriptor that watches one end of a TCP connection.
class Watched {
 public:
  explicit Watched(bool connected = true) {
    if (connected) connect();
  }
  ~Watched() {
    for (const int each : {ours_, theirs_}) close(each);
    forget();
  }

  void connect() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener, any, size), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, any, &size), 0);
    EXPECT_EQ(::connect(theirs_, any, size), 0);
    ours_ = accept(listener, nullptr, nullptr);
    close(listener);
    epoll_event event{EPOLLIN, {}};
    EXPECT_EQ(epoll_ctl(poll_, EPOLL_CTL_ADD, ours_, &event), 0);
  }

  void send() const { EXPECT_EQ(write(theirs_, "!", 1), 1); }
  void take_in() const {
    char byte = 0;
    EXPECT_EQ(read(ours_, &byte, 1), 1);
  }

  // Closes the epoll descriptor.
  void forget() {
    if (poll_ >= 0) close(poll_);
    poll_ = -1;
  }

 private:
  int poll_ = epoll_create1(0);
  const int theirs_ = socket(AF_INET, SOCK_STREAM, 0);
  int ours_ = -1;
};

progress::Slept sleep(Arrivals& arrivals, microseconds most) {
  return arrivals.sleep(std::chrono::steady_clock::now() + most);
}

TEST(Arrivals, EndASleepUntilTheyAreConsumed) {
  Arrivals arrivals;
  const Watched connection;
  arrivals.collect();
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kTimedOut);
  std::thread peer([&connection] {
    std::this_thread::sleep_for(milliseconds(20));
    connection.send();
  });
  progress::Slept slept = progress::Slept::kTimedOut;
  while (slept == progress::Slept::kTimedOut) slept = sleep(arrivals, milliseconds(900));
  peer.join();
  EXPECT_EQ(slept, progress::Slept::kWoken);
  EXPECT_EQ(sleep(arrivals, milliseconds(900)), progress::Slept::kWoken);
  connection.take_in();
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kTimedOut);
}

TEST(Arrivals, SurviveTheOwnersCloseOfADescriptor) {
  Arrivals arrivals;
  Watched connection;
  arrivals.collect();
  connection.forget();
  const Watched in_its_place;
  in_its_place.send();
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kTimedOut);
  connection.send();
  EXPECT_EQ(sleep(arrivals, milliseconds(900)), progress::Slept::kWoken);
}

// Some programs close all descriptors that they do not know, so also the descriptor of Arrivals.
TEST(Arrivals, DoNotWakeAfterTheirDescriptorWasClosed) {
  Arrivals arrivals;
  const Watched connection;
  const int next = dup(0);
  close(next);
  arrivals.collect();
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kTimedOut);
  close(next);
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kNoWakeup);
}

TEST(Arrivals, DoNotWakeWithoutAConnection) {
  const Watched before;
  Arrivals arrivals;
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kNoWakeup);
  const int empty = epoll_create1(0);
  arrivals.collect();
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kNoWakeup);
  close(empty);
}

TEST(Arrivals, DoNotWakeIfADeviceMayCarryMessages) {
  Arrivals arrivals;
  const Watched connection;
  const int device = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(device, 0);
  arrivals.collect();
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kNoWakeup);
  close(device);
}

// UCX connects only when the first message is sent. Before that, there is no connection to watch.
TEST(Arrivals, WakeOnceThereIsAConnection) {
  Arrivals arrivals;
  Watched connection(/*connected=*/false);
  arrivals.collect();
  EXPECT_EQ(sleep(arrivals, microseconds(100)), progress::Slept::kNoWakeup);
  connection.connect();
  connection.send();
  progress::Slept slept = progress::Slept::kNoWakeup;
  while (slept == progress::Slept::kNoWakeup)
    slept = sleep(arrivals, microseconds(100));  // `arrivals` looks for connections periodically
  EXPECT_EQ(slept, progress::Slept::kWoken);
}

TEST(Arrivals, ReadsTheRoundTripTime) {
  Arrivals arrivals;
  Watched connection(/*connected=*/false);
  arrivals.collect();
  EXPECT_EQ(arrivals.round_trip(), microseconds(0));
  connection.connect();
  std::this_thread::sleep_for(kConnectionCheckPeriod);
  connection.send();
  connection.take_in();
  EXPECT_GT(arrivals.round_trip(), microseconds(0));
}

}  // namespace
}  // namespace hbm::communicator::mpi
