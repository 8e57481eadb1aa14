#include "communicator/mpi/arrivals.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/tcp.h"
#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {
namespace {

namespace fs = std::filesystem;

// Returns the open descriptors, ascending, and the target of each, except the descriptor that lists
// them.
std::vector<std::pair<int, std::string>> open_descriptors() {
  std::vector<std::pair<int, std::string>> found;
  std::error_code failed, gone;
  for (fs::directory_iterator at("/proc/self/fd", failed), end; !failed && at != end;
       at.increment(failed)) {
    const fs::path target = fs::read_symlink(at->path(), gone);
    if (gone || target.filename() == "fd") continue;
    found.emplace_back(std::stoi(at->path().filename()), target);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Returns true for a network card, or another device that may reach other nodes.
bool is_device(const std::string& target) {
  return target.starts_with("/dev/") && !target.starts_with("/dev/shm/") && target != "/dev/null";
}

bool is_connected(int descriptor) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return false;
  return peer.ss_family == AF_INET || peer.ss_family == AF_INET6;
}

// Returns the descriptors that an epoll descriptor watches. fdinfo has a line "tfd: 7 events: ..."
// for each.
std::vector<int> watched_by(int poll) {
  std::vector<int> targets;
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(poll));
  for (std::string word; info >> word;) {
    int target = -1;
    if (word == "tfd:" && info >> target) targets.push_back(target);
  }
  return targets;
}

bool has_connection(int poll) { return std::ranges::any_of(watched_by(poll), is_connected); }

}  // namespace

Arrivals::Arrivals() {
  for (const auto& [descriptor, target] : open_descriptors()) before_.push_back(descriptor);
}

Arrivals::Arrivals(int poll) : polls_{fcntl(poll, F_DUPFD_CLOEXEC, 0)}, connected_(true) {
  if (polls_.front() >= 0) return;
  throw Error(ErrorKind::kUnavailable,
              std::string("a rank cannot duplicate a descriptor: ") + std::strerror(errno));
}

Arrivals::~Arrivals() {
  for (const int poll : polls_) close(poll);
}

void Arrivals::collect() noexcept {
  if (before_.empty()) return;
  std::vector<int> polls;
  for (const auto& [descriptor, target] : open_descriptors()) {
    if (std::binary_search(before_.begin(), before_.end(), descriptor)) continue;
    if (is_device(target)) return;
    if (target == "anon_inode:[eventpoll]") polls.push_back(descriptor);
  }
  for (const int poll : polls) {
    const int kept = fcntl(poll, F_DUPFD_CLOEXEC, 0);
    if (kept >= 0) polls_.push_back(kept);
  }
}

bool Arrivals::connected() {
  if (connected_.load(std::memory_order_relaxed)) return true;
  if (polls_.empty()) return false;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  if (now.count() < next_check_.load(std::memory_order_relaxed)) return false;
  const std::chrono::steady_clock::duration later = now + kConnectionCheckPeriod;
  next_check_.store(later.count(), std::memory_order_relaxed);
  if (!std::ranges::any_of(polls_, has_connection)) return false;
  connected_.store(true, std::memory_order_relaxed);
  return true;
}

std::chrono::microseconds Arrivals::round_trip() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  if (now.count() < next_reading_.load(std::memory_order_relaxed) || !connected()) {
    return std::chrono::microseconds(round_trip_.load(std::memory_order_relaxed));
  }
  const std::chrono::steady_clock::duration later = now + kRoundTripPeriod;
  next_reading_.store(later.count(), std::memory_order_relaxed);
  std::chrono::microseconds longest{0};
  for (const int poll : polls_) {
    for (const int target : watched_by(poll)) longest = std::max(longest, least_round_trip(target));
  }
  round_trip_.store(longest.count(), std::memory_order_relaxed);
  return longest;
}

progress::Slept Arrivals::sleep(std::chrono::steady_clock::time_point until) {
  if (!connected()) return progress::Slept::kNoWakeup;
  std::vector<pollfd> readable;
  for (const int poll : polls_) readable.push_back({poll, POLLIN, 0});
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::nanoseconds left = std::max(until, now) - now;
  const auto seconds = std::chrono::floor<std::chrono::seconds>(left);
  const timespec limit{seconds.count(), (left - seconds).count()};
  if (ppoll(readable.data(), readable.size(), &limit, nullptr) <= 0)
    return progress::Slept::kTimedOut;
  const auto is_readable = [](const pollfd& one) { return (one.revents & POLLIN) != 0; };
  return std::ranges::any_of(readable, is_readable) ? progress::Slept::kWoken
                                                    : progress::Slept::kNoWakeup;
}

}  // namespace hbm::communicator::mpi
