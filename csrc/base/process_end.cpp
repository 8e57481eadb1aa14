#include "base/process_end.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "base/tuning.h"

namespace hbm {
namespace {

struct EndOfThisProcess {
  std::atomic<bool> begun{false};
  std::atomic<bool> by_main_thread{false};
  std::atomic<int> sections{0};  // number of short sections of threads that have not parked
  std::mutex mutex;              // guards `stops`; taken alone
  std::vector<void (*)()> stops;
};

thread_local bool ends_the_process = false;
thread_local std::atomic<bool> parked{false};
thread_local int own_sections = 0;

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

const std::atomic<bool>& parked_here() noexcept { return parked; }

void park() noexcept {
  per_process<EndOfThisProcess>().sections.fetch_sub(own_sections);
  parked.store(true, std::memory_order_release);
  for (;;) pause();
}

ShortSection::ShortSection() noexcept {
  ++own_sections;
  per_process<EndOfThisProcess>().sections.fetch_add(1);
}

ShortSection::~ShortSection() {
  --own_sections;
  per_process<EndOfThisProcess>().sections.fetch_sub(1);
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
  const auto until = std::chrono::steady_clock::now() + kFinalSectionTimeout;
  while (end.sections.load() > own_sections && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kFinalSectionCheckPeriod);
  }
}

}  // namespace

void end_process() noexcept {
  if (ends_the_process && process_ends()) return;
  ends_the_process = true;
  begin_end();
}

void end_process_of_main_thread() noexcept {
  per_process<EndOfThisProcess>().by_main_thread.store(true);
  begin_end();
}

}  // namespace hbm
