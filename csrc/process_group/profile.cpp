#include "process_group/profile.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "base/fork.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

// The records of this process. A forked child begins with none.
struct Recorder {
  std::mutex mutex;                        // guards the members below
  std::string first_group;                 // as in Profile::Records
  bool recording = false;                  // between start() and stop()
  int64_t begin_ns = 0;                    // of the recording
  uint64_t unrecorded = 0;                 // issued before the recording
  std::optional<ProfileTotals> totals;     // absent before start_totals()
  uint64_t issued = 0;                     // by this process, in all recordings and totals
  uint64_t before = 0;                     // issued before the ring began
  std::vector<Profile::Operation> latest;  // a ring, with operation n at place(n)

  bool on() const { return recording || totals; }
  size_t place(uint64_t number) const { return (number - before - 1) % kProfiledOperations; }

  // Begins the ring, unless it is in use.
  void begin() {
    if (on()) return;
    latest = {};
    latest.reserve(kProfiledOperations);
    before = issued;
  }
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

// Calls `use` with the operation, under the recorder's mutex, if it is in the ring.
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

// Adds an operation that has ended to the totals. Computation of the issuing thread ends before a
// thread waits, so busy_ns is the time that it has hidden.
void add_up(ProfileTotals& totals, const Profile::Operation& operation) noexcept {
  const Profile::Issued& issued = operation.issued;
  const progress::Observation& observed = operation.observed;
  const auto bytes = static_cast<uint64_t>(issued.bytes);
  const int64_t transit = operation.end_ns - operation.begin_ns;
  const int last = observed.last_rank;
  totals.add({.key = {.kind = issued.kind->word(),
                      .limit = size_limit(bytes),
                      .path = issued.path(),
                      .staged = observed.staged,
                      .zero_copy = observed.zero_copy,
                      .last_rank = last < 0 ? -1 : issued.group->ranks[static_cast<size_t>(last)]},
              .calls = 1,
              .bytes = bytes,
              .transit_ns = transit,
              .hidden_ns = std::min(operation.busy_ns, transit),
              .waiting_ns = observed.waited_ns});
}

}  // namespace

void Profile::formed(const Group& group) {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  if (records.first_group.empty()) records.first_group = group.key;
}

int64_t Profile::now() noexcept { return read(CLOCK_MONOTONIC); }

bool Profile::start() {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  if (records.recording) return false;
  records.begin();
  records.recording = true;
  records.unrecorded = records.issued;
  records.begin_ns = now();
  on_.store(true, std::memory_order_relaxed);
  return true;
}

Profile::Records Profile::stop() {
  Recorder& records = recorder();
  Records taken;
  std::unique_lock lock(records.mutex);
  records.recording = false;
  on_.store(records.on(), std::memory_order_relaxed);
  taken.first_group = records.first_group;
  taken.begin_ns = records.begin_ns;
  taken.end_ns = now();
  const uint64_t recorded = records.issued - records.unrecorded;
  if (records.totals) {
    const uint64_t kept = std::min<uint64_t>(recorded, records.latest.size());
    taken.operations.reserve(kept);
    for (uint64_t number = records.issued - kept + 1; number <= records.issued; ++number) {
      taken.operations.push_back(records.latest[records.place(number)]);
    }
  } else {
    taken.operations = std::exchange(records.latest, {});
  }
  lock.unlock();
  taken.lost = recorded - taken.operations.size();
  std::ranges::sort(taken.operations, {}, &Operation::number);
  return taken;
}

void Profile::start_totals() {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  if (records.totals) return;
  records.begin();
  records.totals.emplace();
  progress::times_noted.store(true, std::memory_order_relaxed);
  on_.store(true, std::memory_order_relaxed);
}

ProfileTotals Profile::totals() {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  return records.totals ? *records.totals : ProfileTotals();
}

uint64_t Profile::issue(Issued issued) noexcept {
  Recorder& records = recorder();
  const std::lock_guard lock(records.mutex);
  if (!records.on()) return 0;
  const uint64_t number = ++records.issued;
  Operation operation{.issued = std::move(issued), .number = number, .begin_ns = now()};
  // push_back() cannot throw: begin() has reserved the memory.
  if (records.latest.size() < kProfiledOperations) {
    records.latest.push_back(std::move(operation));
  } else {
    Operation& oldest = records.latest[records.place(number)];
    if (records.totals && oldest.end_ns == 0) records.totals->leave_out();
    oldest = std::move(operation);
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

void Profile::ended(uint64_t number, const progress::Observation& observed) noexcept {
  with(number, [&observed](Operation& operation) {
    operation.end_ns = now();
    operation.observed = observed;
    if (!operation.issued.async) operation.waited_ns = operation.end_ns - operation.begin_ns;
    count(operation);
    std::optional<ProfileTotals>& totals = recorder().totals;
    if (totals) add_up(*totals, operation);
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
