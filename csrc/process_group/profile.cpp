#include "process_group/profile.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/fork.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

// The records of this process. A forked child begins with none.
struct Recorder {
  std::mutex mutex;  // guards the members below
  bool recording = false;
  int64_t begin_ns = 0;
  uint64_t issued = 0;                     // by this process, in all recordings
  uint64_t before = 0;                     // issued in earlier recordings
  std::vector<Profile::Operation> latest;  // a ring, with operation n at place(n)

  size_t place(uint64_t number) const { return (number - before - 1) % kProfiledOperations; }
};

Recorder& recorder() { return per_process<Recorder>(); }

// Returns -1 if the clock's thread has ended.
int64_t read(clockid_t clock) noexcept {
  timespec time{};
  if (clock_gettime(clock, &time) != 0) return -1;
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

clockid_t clock_of_this_thread() noexcept {
  clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
  pthread_getcpuclockid(pthread_self(), &clock);
  return clock;
}

// Calls `use` with the operation, under the mutex, if it is in the records.
template <class Use>
void with(uint64_t number, const Use& use) noexcept {
  if (number == 0) return;
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  if (number <= records.before) return;
  const size_t place = records.place(number);
  if (place >= records.latest.size()) return;  // of the parent of this process
  Profile::Operation& found = records.latest[place];
  if (found.number == number) use(found);
}

// Adds up the processor time of the issuing thread, once.
void count(Profile::Operation& operation) noexcept {
  if (std::exchange(operation.counted, true) || !operation.returned) return;
  const int64_t now = read(operation.thread);
  if (now > operation.thread_ns) operation.busy_ns = now - operation.thread_ns;
}

}  // namespace

int64_t Profile::now() noexcept { return read(CLOCK_MONOTONIC); }

bool Profile::start() {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  if (records.recording) return false;
  records.latest = {};
  records.latest.reserve(kProfiledOperations);
  records.recording = true;
  records.before = records.issued;
  records.begin_ns = now();
  on_.store(true, std::memory_order_relaxed);
  return true;
}

Profile::Records Profile::stop() {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  on_.store(false, std::memory_order_relaxed);
  records.recording = false;
  Records taken{.begin_ns = records.begin_ns,
                .end_ns = now(),
                .lost = records.issued - records.before - records.latest.size(),
                .operations = std::exchange(records.latest, {})};
  std::ranges::sort(taken.operations, {}, &Operation::number);
  return taken;
}

uint64_t Profile::issue(Issued issued) noexcept {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  if (!records.recording) return 0;
  const uint64_t number = ++records.issued;
  Operation operation{.issued = std::move(issued), .number = number, .begin_ns = now()};
  // push_back() cannot throw: start() has reserved the memory.
  if (records.latest.size() < kProfiledOperations) {
    records.latest.push_back(std::move(operation));
  } else {
    records.latest[records.place(number)] = std::move(operation);
  }
  return number;
}

void Profile::returned(uint64_t number) noexcept {
  with(number, [](Operation& operation) {
    operation.thread = clock_of_this_thread();
    operation.thread_ns = read(operation.thread);
    operation.returned = true;
  });
}

void Profile::ended(uint64_t number) noexcept {
  with(number, [](Operation& operation) {
    operation.end_ns = now();
    if (!operation.issued.async) operation.waited_ns = operation.end_ns - operation.begin_ns;
    count(operation);
  });
}

void Profile::wait_begins(uint64_t number) noexcept {
  with(number, [](Operation& operation) { count(operation); });
}

void Profile::waited(uint64_t number, int64_t begin) noexcept {
  with(number, [begin](Operation& operation) {
    const int64_t until = operation.end_ns != 0 ? std::min(now(), operation.end_ns) : now();
    operation.waited_ns += std::max<int64_t>(until - begin, 0);
  });
}

}  // namespace hbm::process_group
