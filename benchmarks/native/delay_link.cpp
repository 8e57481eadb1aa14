// A link with a rate and a delay, for network namespaces whose kernel has no netem: a relay between
// two TAP devices.
//
//   delay_link NAME0 NAME1 MEGABITS_PER_SECOND MILLISECONDS
//
// creates the two devices and prints "ok". The caller then moves each device into its namespace.
// In each direction frames leave one after the other, at the rate, and arrive after the delay. A
// frame is dropped if kQueueBytes are on their way before it. For each line of standard input the
// program prints "ok" and, for each direction, the most bytes that were on their way since the last
// line. Both ends of the link disappear with the program, which ends when its standard input ends.
// It needs root.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

namespace {

using std::chrono::duration;
using std::chrono::duration_cast;
using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

constexpr size_t kFrameBytes = 9100;  // the longest frame
constexpr size_t kQueueBytes = 16 << 20;
constexpr int kFramesPerTurn = 64;

struct Frame {
  Clock::time_point arrives;
  std::vector<std::byte> data;
};

// One direction of the link.
class Way {
 public:
  Way(int from, int to, duration<double> byte_time, duration<double> delay)
      : from_(from), to_(to), byte_time_(byte_time), delay_(duration_cast<nanoseconds>(delay)) {}

  // Takes the frames that the sending device has, a limited number in one call.
  void take(Clock::time_point now) {
    for (int frames = 0; frames < kFramesPerTurn; ++frames) {
      const ssize_t got = read(from_, frame_.data(), frame_.size());
      if (got <= 0) return;
      const auto bytes = static_cast<size_t>(got);
      if (waiting_bytes_ + bytes > kQueueBytes) continue;
      free_ = std::max(free_, now) +
              duration_cast<nanoseconds>(static_cast<double>(bytes) * byte_time_);
      waiting_bytes_ += bytes;
      most_ = std::max(most_, waiting_bytes_);
      frames_.push_back({free_ + delay_, {frame_.data(), frame_.data() + bytes}});
    }
  }

  // Writes the frames that have arrived. A frame that the receiving device refuses is lost.
  void deliver(Clock::time_point now) {
    while (!frames_.empty() && frames_.front().arrives <= now) {
      const std::vector<std::byte>& data = frames_.front().data;
      [[maybe_unused]] const ssize_t written = write(to_, data.data(), data.size());
      waiting_bytes_ -= data.size();
      frames_.pop_front();
    }
  }

  // Returns the most bytes on their way since the last call.
  size_t take_most() { return std::exchange(most_, waiting_bytes_); }

  std::optional<Clock::time_point> next() const {
    return frames_.empty() ? std::nullopt : std::optional(frames_.front().arrives);
  }

 private:
  const int from_;
  const int to_;
  const duration<double> byte_time_;
  const nanoseconds delay_;
  std::array<std::byte, kFrameBytes> frame_{};
  std::deque<Frame> frames_;
  size_t waiting_bytes_ = 0;  // sent and not yet delivered
  size_t most_ = 0;           // of waiting_bytes_
  Clock::time_point free_{};  // when the link has sent all frames
};

// Creates a TAP device. Returns -1 and prints the cause if the kernel refuses it.
int create(const char* name) {
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (device >= 0 && ioctl(device, TUNSETIFF, &request) == 0) return device;
  std::perror(name);
  return -1;
}

// Answers a line of standard input. Returns false if it has ended.
bool answer(std::array<Way, 2>& ways) {
  std::array<char, 80> line{};
  if (read(STDIN_FILENO, line.data(), line.size()) <= 0) return false;
  std::printf("ok %zu %zu\n", ways[0].take_most(), ways[1].take_most());
  std::fflush(stdout);
  return true;
}

// Relays until standard input ends.
void relay(const std::array<int, 2>& devices, std::array<Way, 2>& ways) {
  std::array<pollfd, 3> waits{
      {{devices[0], POLLIN, 0}, {devices[1], POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}}};
  while (waits[2].revents == 0 || answer(ways)) {
    const auto now = Clock::now();
    nanoseconds pause = std::chrono::seconds(1);
    for (Way& way : ways) {
      way.take(now);
      way.deliver(now);
      if (const auto next = way.next()) pause = std::min(pause, nanoseconds(*next - now));
    }
    pause = std::max(pause, nanoseconds(0));
    const timespec time{pause.count() / 1'000'000'000, pause.count() % 1'000'000'000};
    ppoll(waits.data(), waits.size(), &time, nullptr);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const std::array<int, 2> devices{create(arguments[1]), create(arguments[2])};
  if (devices[0] < 0 || devices[1] < 0) return 1;
  const duration<double> byte_time(8 / (std::atof(arguments[3]) * 1e6));
  const duration<double> delay(std::atof(arguments[4]) / 1e3);
  std::array<Way, 2> ways{Way{devices[0], devices[1], byte_time, delay},
                          Way{devices[1], devices[0], byte_time, delay}};
  std::puts("ok");
  std::fflush(stdout);
  relay(devices, ways);
}
