#include "base/process_end.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "base/fork.h"

namespace hbm {
namespace {

struct EndOfThisProcess {
  std::atomic<bool> begun{false};
  std::atomic<bool> by_main_thread{false};
  std::mutex mutex;  // guards `stops`; taken alone
  std::vector<void (*)()> stops;
};

thread_local bool ends_the_process = false;

}  // namespace

namespace process_end {

constinit std::atomic<bool> begun{false};

bool here() noexcept { return per_process<EndOfThisProcess>().begun.load(); }

bool elsewhere() noexcept {
  const EndOfThisProcess& end = per_process<EndOfThisProcess>();
  if (!end.begun.load() || ends_the_process) return false;
  return !end.by_main_thread.load() || gettid() != getpid();
}

}  // namespace process_end

void park() noexcept {
  for (;;) pause();
}

void at_process_end(void (*stop)()) {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(&end_process); });
  EndOfThisProcess& end = per_process<EndOfThisProcess>();
  const std::lock_guard lock(end.mutex);
  if (std::ranges::find(end.stops, stop) == end.stops.end()) end.stops.push_back(stop);
}

namespace {

void begin_end() noexcept {
  EndOfThisProcess& end = per_process<EndOfThisProcess>();
  end.begun.store(true);
  process_end::begun.store(true);
  std::unique_lock lock(end.mutex);
  const std::vector<void (*)()> stops = end.stops;
  lock.unlock();
  for (const auto& stop : stops) stop();
}

}  // namespace

void end_process() noexcept {
  ends_the_process = true;
  begin_end();
}

void end_process_of_main_thread() noexcept {
  per_process<EndOfThisProcess>().by_main_thread.store(true);
  begin_end();
}

}  // namespace hbm
