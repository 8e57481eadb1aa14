#include "communicator/shm/shm_group.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/life_sign.h"
#include "base/waiting.h"
#include "communicator/shm/tuning.h"

namespace hbm::communicator::shm {
namespace {

std::string text_of(const FailureReport& failure) {
  return {failure.text.data(), strnlen(failure.text.data(), failure.text.size())};
}

// The finaliser of splitmix64, made odd, so that any wrong count changes the sum of the balances.
uint64_t key_of(uint64_t from, uint64_t to) {
  uint64_t key = ((from << 32 | to) + 1) * 0x9E3779B97F4A7C15;
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9;
  key = (key ^ (key >> 27)) * 0x94D049BB133111EB;
  return (key ^ (key >> 31)) | 1;
}

}  // namespace

bool is_dead(int pidfd) noexcept {
  if (pidfd < 0) return false;
  pollfd ended{pidfd, POLLIN, 0};
  return poll(&ended, 1, 0) == 1;
}

bool ShmGroup::is_dead(size_t index) const noexcept {
  return index != self_ &&
         (shows_death(control(index).life) || shm::is_dead(local_ranks_[index].pidfd));
}

ShmGroup::ShmGroup(Setup setup)
    : group_(std::move(setup.group)),
      local_ranks_(std::move(setup.local_ranks)),
      self_(setup.self),
      layout_(local_ranks_.size(), setup.chunk_bytes),
      oversubscribed_(setup.oversubscribed),
      parallel_(setup.threads),
      keep_(std::move(setup.keep)),
      allocate_(std::move(setup.allocate)),
      free_(std::move(setup.free)),
      sources_(local_ranks_.size()),
      sinks_(local_ranks_.size()) {
  for (size_t i = 0; i < size(); ++i) keys_.push_back({key_of(self_, i), key_of(i, self_)});
  for (size_t i = 0; i < size(); ++i) {
    const Control& found = control(i);
    if (found.magic == kRegionMagic && found.chunk_bytes == layout_.chunk_bytes) continue;
    throw Error(ErrorKind::kMismatch,
                local_ranks_[i].name + " of " + group_ +
                    " has laid out its shared memory in another way; every rank must run the same "
                    "version of torch_hbmcomm with the same staging_bytes");
  }
}

ShmGroup::~ShmGroup() {
  if (fork_.in_child()) return;
  for (size_t i = 0; i < size(); ++i) {
    if (i != self_) control(i).released.fetch_add(1, std::memory_order_release);
  }
}

bool ShmGroup::released(const std::byte* region, size_t local_ranks) noexcept {
  const auto& control = *reinterpret_cast<const Control*>(region);
  return control.released.load(std::memory_order_acquire) + 1 >= local_ranks;
}

// The last rank to publish finds all ranks here, and wakes the ranks that sleep. If several ranks
// publish last at the same time, each of them may wake the sleeping ranks. No rank has to wake
// earlier.
void ShmGroup::publish() noexcept {
  arrived_ = 0;
  ++phase_;
  slot_at(self_, phase_)->phase.store(phase_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!all_here()) return;
  for (size_t i = 0; i < size(); ++i) {
    if (i != self_) ring(control(i).collectives);
  }
}

bool ShmGroup::all_here() noexcept {
  while (arrived_ < size() &&
         slot_at(arrived_, phase_)->phase.load(std::memory_order_seq_cst) == phase_) {
    ++arrived_;
  }
  return arrived_ == size();
}

std::vector<int> ShmGroup::missing() const {
  std::vector<int> ranks;
  for (size_t i = 0; i < size(); ++i) {
    if (slot_at(i, phase_)->phase.load(std::memory_order_acquire) != phase_)
      ranks.push_back(local_ranks_[i].group_rank);
  }
  return ranks;
}

TransferLocation* ShmGroup::locations(Slot& slot) const noexcept {
  return reinterpret_cast<TransferLocation*>(reinterpret_cast<std::byte*>(&slot) + sizeof(Slot));
}

const TransferLocation* ShmGroup::locations(const Slot& slot) const noexcept {
  return reinterpret_cast<const TransferLocation*>(reinterpret_cast<const std::byte*>(&slot) +
                                                   sizeof(Slot));
}

std::byte* ShmGroup::data(Slot& slot) const noexcept {
  return reinterpret_cast<std::byte*>(&slot) + layout_.data;
}

const std::byte* ShmGroup::data(const Slot& slot) const noexcept {
  return reinterpret_cast<const std::byte*>(&slot) + layout_.data;
}

bool ShmGroup::sleep(Clock::time_point until, uint32_t ends_seen, bool polled) {
  if (!polled && spin(until, [this] { return all_here(); })) return all_here();
  Doorbell& own = control(self_).collectives;
  const uint32_t seen = own.bell.load(std::memory_order_acquire);
  own.asleep.fetch_add(1, std::memory_order_seq_cst);
  if (!all_here() && ends_seen == ends()) futex_wait(own.bell, seen, until - Clock::now());
  own.asleep.fetch_sub(1, std::memory_order_relaxed);
  return all_here();
}

uint32_t ShmGroup::message_rings() const noexcept {
  return control(self_).messages.bell.load(std::memory_order_seq_cst);
}

bool ShmGroup::sleep_messages(Clock::time_point until, uint32_t seen, bool polled) {
  const auto rung = [this, seen] { return message_rings() != seen; };
  if (until == Clock::time_point::min() || (!polled && spin(until, rung))) return rung();
  Doorbell& own = control(self_).messages;
  own.asleep.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(own.bell, seen, until - Clock::now());
  own.asleep.fetch_sub(1, std::memory_order_relaxed);
  return rung();
}

void ShmGroup::ring_messages(size_t index) noexcept {
  Doorbell& doorbell = control(index).messages;
  doorbell.bell.fetch_add(1, std::memory_order_seq_cst);
  if (doorbell.asleep.load(std::memory_order_seq_cst) != 0) futex_wake(doorbell.bell);
}

// Spins, then yields. Returns true if `ready()` is true, or the time `until` has passed.
bool ShmGroup::spin(Clock::time_point until, const std::function<bool()>& ready) const {
  SpinBudget budget;
  while (!oversubscribed_ && budget.covers(kSpinTime)) {
    for (int spin = 0; spin < kPollsPerClockReading; ++spin) {
      if (ready()) return true;
      relax();
    }
    budget.check();
  }
  while (budget.covers(oversubscribed_ ? kOversubscribedYieldTime : kYieldTime)) {
    if (ready() || budget.now() >= until) return true;
    sched_yield();
    budget.check();
  }
  return ready();
}

void ShmGroup::ring(Doorbell& doorbell) noexcept {
  if (doorbell.asleep.load(std::memory_order_seq_cst) == 0) return;
  doorbell.bell.fetch_add(1, std::memory_order_release);
  futex_wake(doorbell.bell);
}

// A sleeper reads the bell before `ends_`. So either it sees the new count, or the bell changes
// after the sleeper has read it, and the futex does not let it sleep.
void ShmGroup::wake_for_end() noexcept {
  ends_.fetch_add(1, std::memory_order_seq_cst);
  Doorbell& own = control(self_).collectives;
  own.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(own.bell);
  ring_messages(self_);
}

void ShmGroup::wake() noexcept {
  ring(control(self_).collectives);
  ring_messages(self_);
}

void ShmGroup::leave() noexcept { control(self_).left.store(1, std::memory_order_release); }

std::vector<int> ShmGroup::dead() const {
  std::vector<int> ranks;
  for (size_t i = 0; i < size(); ++i) {
    if (is_dead(i) && !has_left(i)) ranks.push_back(local_ranks_[i].group_rank);
  }
  return ranks;
}

std::vector<int> ShmGroup::left() const {
  std::vector<int> ranks;
  for (size_t i = 0; i < size(); ++i) {
    if (has_left(i)) ranks.push_back(local_ranks_[i].group_rank);
  }
  return ranks;
}

void ShmGroup::require_alive(const std::vector<int>& ranks, const progress::Operation& operation,
                             const std::function<bool()>& ready) {
  require_no_report();
  for (size_t i = 0; i < size(); ++i) {
    const LocalRank& local_rank = local_ranks_[i];
    if (std::find(ranks.begin(), ranks.end(), local_rank.group_rank) == ranks.end()) continue;
    const bool died = is_dead(i);
    const bool left = has_left(i);  // read last, because a rank leaves before its process ends
    if (!left && !died) continue;
    if (ready()) return;  // the rank published before it ended or left
    if (left) {
      require_no_report();
      throw Error(ErrorKind::kPeer, operation.describe() + ": " + group_ +
                                        " was destroyed on a rank that this one waits for, " +
                                        local_rank.name);
    }
    if (found_death_) found_death_(local_rank.group_rank);
    const std::string text =
        report(operation.describe() + ": " + local_rank.name + " has died", true);
    require_no_report();
    throw Error(ErrorKind::kDeath, text);
  }
}

std::string ShmGroup::report(const std::string& failure, bool death) noexcept {
  FailureReport& record = control(0).failure;
  uint32_t state = FailureReport::kNone;
  if (record.state.compare_exchange_strong(state, FailureReport::kWriting,
                                           std::memory_order_acq_rel)) {
    record.death = death ? 1 : 0;
    failure.copy(record.text.data(), record.text.size() - 1);
    record.state.store(FailureReport::kWritten, std::memory_order_seq_cst);
  } else {
    // The rank that writes the report may die before it has finished.
    const Clock::time_point end = Clock::now() + kReportWriteTimeout;
    while (!failed() && Clock::now() < end) std::this_thread::yield();
  }
  for (size_t i = 0; i < size(); ++i) {
    ring(control(i).collectives);
    ring_messages(i);
  }
  return failed() ? text_of(record) : failure;
}

bool ShmGroup::failed() const noexcept {
  return control(0).failure.state.load(std::memory_order_seq_cst) == FailureReport::kWritten;
}

void ShmGroup::require_no_report() const {
  if (!failed()) return;
  const FailureReport& record = control(0).failure;
  if (record.death != 0) throw Error(ErrorKind::kDeath, text_of(record));
  const std::string text = text_of(record);
  // A report from another node has the prefix already.
  const std::string prefix = group_ + " has failed: ";
  throw Error(ErrorKind::kPeer, text.starts_with(prefix) ? text : prefix + text);
}

std::byte* ShmGroup::address_in_segment(size_t index, uint64_t offset, size_t bytes) const {
  const LocalRank& local_rank = local_ranks_[index];
  if (offset <= local_rank.segment_bytes && bytes <= local_rank.segment_bytes - offset) {
    return at(index, offset);
  }
  throw Error(ErrorKind::kMismatch,
              local_rank.name + " of " + group_ + " names " + std::to_string(bytes) + " bytes at " +
                  std::to_string(offset) + " of its shared segment, which has " +
                  std::to_string(local_rank.segment_bytes));
}

std::optional<uint64_t> ShmGroup::offset_in_segment(const void* address,
                                                    size_t bytes) const noexcept {
  const LocalRank& own = local_ranks_[self_];
  const auto start = reinterpret_cast<uintptr_t>(own.segment);
  const auto first = reinterpret_cast<uintptr_t>(address);
  if (first < start || first - start > own.segment_bytes) return std::nullopt;
  if (bytes > own.segment_bytes - (first - start)) return std::nullopt;
  return first - start;
}

}  // namespace hbm::communicator::shm
