#include "communicator/failure/failure_monitor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/interruption.h"
#include "base/log.h"
#include "communicator/failure/tuning.h"

namespace hbm::communicator::failure {
namespace {

using std::chrono::milliseconds;

// Returns a pidfd of the process; none if unavailable. Sets `ended` if the process has ended.
Descriptor open_process(const bootstrap::Member& member, bool* ended) {
  Descriptor pidfd(static_cast<int>(syscall(SYS_pidfd_open, member.pid, 0)));
  *ended = !pidfd && errno == ESRCH;
  if (!pidfd) return pidfd;
  // Another process may have got the pid since.
  *ended = bootstrap::is_restarted(member.started, bootstrap::start_of(member.pid));
  return pidfd;
}

constexpr std::initializer_list<GroupState> kFormed = {GroupState::kLocal, GroupState::kMonitored,
                                                       GroupState::kLeaving, GroupState::kLeft,
                                                       GroupState::kStopped};

bool see_each_other(const bootstrap::Member& one, const bootstrap::Member& other) {
  return one.boot_id == other.boot_id && one.pid_namespace == other.pid_namespace &&
         one.forced_node == other.forced_node;
}

}  // namespace

FailureMonitor& FailureMonitor::here() { return per_process<FailureMonitor>(); }

void FailureMonitor::add(const std::shared_ptr<MonitoredGroup>& group) {
  const std::lock_guard lock(mutex_);
  groups_.insert(group);
  if (!mailbox_) mailbox_.emplace(bootstrap::mailbox_id());
}

void FailureMonitor::remove(const std::shared_ptr<MonitoredGroup>& group) {
  const std::lock_guard lock(mutex_);
  groups_.erase(group);
  group->state = GroupState::kStopped;
  group->wake_sleepers = nullptr;  // a store may keep the group for longer (JobStore::to_remove)
  std::set<std::string> used;
  std::set<bootstrap::KeyValue*> stores;
  for (const auto& other : groups_) {
    used.insert(other->processes.begin(), other->processes.end());
    stores.insert(other->job_store.get());
  }
  std::erase_if(processes_, [&](const auto& entry) { return !used.contains(entry.first); });
  std::erase_if(wanted_connections_,
                [&](const auto& entry) { return !used.contains(entry.first); });
  std::erase_if(stores_, [&](const auto& entry) { return !stores.contains(entry.first); });
  std::erase_if(greeted_, [&](const auto& process) { return !used.contains(process); });
  drop_unused_listener();
  changed_.notify_all();
}

void FailureMonitor::meet(MonitoredGroup& group, int rank, const bootstrap::Member& member) {
  const std::lock_guard lock(mutex_);
  group.require({GroupState::kMeeting}, "meet()");
  const auto r = static_cast<size_t>(rank);
  group.processes.resize(std::max(group.processes.size(), r + 1));
  group.names.resize(group.processes.size());
  group.processes[r] = member.process;
  group.names[r] = bootstrap::rank_name(rank, member);
  if (rank == group.rank) {
    group.self = member;
    return;
  }
  if (member.process.empty() || member.process == group.self->process) return;
  const std::string name = group.named(rank) + " of " + group.name;
  if (see_each_other(*group.self, member)) {
    const auto [found, is_new] = processes_.try_emplace(member.process, WatchedProcess{name, {}});
    bool ended = false;
    if (is_new) found->second.pidfd = open_process(member, &ended);
    if (ended) mark_ended(member.process);
    return;
  }
  processes_.try_emplace(member.process, WatchedProcess{name, {}});
  group.spans_nodes = true;
  open_store(group);
  if (rank == 0 && !connected_.contains(member.process) && !unreachable_.contains(member.process)) {
    const bool near = member.boot_id == group.self->boot_id &&
                      member.network_namespace == group.self->network_namespace;
    wanted_connections_.emplace(
        member.process, WantedConnection{member.links, near, Clock::now() + kConnectionTimeout});
  }
  if (ended_.contains(member.process)) publish_death(group, rank);
}

std::string FailureMonitor::prepare(MonitoredGroup& group) {
  std::unique_lock lock(mutex_);
  group.require({GroupState::kMeeting}, "prepare()");
  group.listens = group.rank == 0;
  const std::string where = group.listens ? listen(lock) : std::string();
  start();
  return where;
}

std::string FailureMonitor::listen(std::unique_lock<std::mutex>& lock) {
  if (!thread_) {
    if (!connections_)
      connections_ = std::make_unique<LivenessConnections>(bootstrap::process_id());
    return where_ = connections_->listen(listen_failure_);
  }
  wants_listener_ = true;
  wake();
  changed_.wait_for(lock, kListenTimeout, [this] { return !wants_listener_ || stopping_; });
  return where_;
}

void FailureMonitor::all_met(MonitoredGroup& group) {
  const std::lock_guard lock(mutex_);
  group.require({GroupState::kMeeting}, "all_met()");
  group.state = GroupState::kJoining;
  group.listens = group.spans_nodes;
  if (group.rank == 0 && group.spans_nodes && where_.empty() && !listen_failure_.empty()) {
    log::warn(
        "the ranks of other machines notice the end of this process at a timeout only, "
        "because it cannot listen for them: " +
        std::exchange(listen_failure_, {}));
  }
  drop_unused_listener();
}

// Stops listening if no group needs the listener. Once the thread runs, only the thread closes the
// listener, and the connections stay. REQUIRES: mutex_ is held.
void FailureMonitor::drop_unused_listener() {
  const auto listens = [](const auto& group) { return group->listens; };
  if (where_.empty() || std::ranges::any_of(groups_, listens)) return;
  where_.clear();
  if (thread_) {
    wake();
  } else {
    connections_.reset();
  }
}

// REQUIRES: mutex_ is held. This also applies to every function below that does not lock mutex_.
void FailureMonitor::mark_ended(const std::string& process) {
  if (!ended_.insert(process).second) return;
  for (const auto& group : groups_) {
    for (size_t rank = 0; rank < group->processes.size(); ++rank) {
      if (group->processes[rank] != process) continue;
      if (group->wake_sleepers) group->wake_sleepers();
      if (group->is_monitored()) {
        group->undecided.emplace(static_cast<int>(rank), Clock::now());
        reports_until_ = Clock::now() + kReportsTime;
      } else if (group->spans_nodes || group->state == GroupState::kMeeting) {
        // A rank of another node may come later, and then finds the death in the failure log.
        try {
          open_store(*group);
          publish_death(*group, static_cast<int>(rank));
        } catch (const std::exception& error) {  // no descriptor or thread is left
          log::warn(std::string("other nodes are not told of a death: ") + error.what());
        }
      }
    }
  }
  wake();
}

void FailureMonitor::check_processes() {
  std::vector<pollfd> ends;
  std::vector<const std::string*> ids;
  for (const auto& [id, process] : processes_) {
    if (!process.pidfd || ended_.contains(id)) continue;
    ends.push_back({process.pidfd.get(), POLLIN, 0});
    ids.push_back(&id);
  }
  if (ends.empty() || poll(ends.data(), ends.size(), 0) <= 0) return;
  for (size_t i = 0; i < ends.size(); ++i) {
    if (ends[i].revents != 0) mark_ended(*ids[i]);
  }
}

// Makes the thread do rounds at the group's store from this call on.
void FailureMonitor::open_store(const MonitoredGroup& group) {
  std::shared_ptr<JobStore>& store = stores_[group.job_store.get()];
  if (!store) store = std::make_shared<JobStore>(group.job_store);
  store->closed = false;
  start();
  wake();
}

void FailureMonitor::publish(const MonitoredGroup& group, FailureEntry entry) {
  const auto store = stores_.find(group.job_store.get());
  if (store == stores_.end()) return;
  store->second->to_publish.push_back(std::move(entry));
  wake();
}

void FailureMonitor::publish_death(const MonitoredGroup& group, int rank) {
  const std::string& process = group.processes[static_cast<size_t>(rank)];
  if (!published_.insert(process).second) return;
  publish(group, {FailureKind::kDeath, process, group.named(rank)});
}

std::vector<std::string> FailureMonitor::ended(const MonitoredGroup& group,
                                               const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  check_processes();
  std::vector<std::string> names;
  for (const int rank : ranks) {
    const auto r = static_cast<size_t>(rank);
    if (r < group.processes.size() && !group.processes[r].empty()) {
      if (ended_.contains(group.processes[r])) names.push_back(group.named(rank));
      continue;
    }
    if (r >= group.global_ranks.size()) continue;
    for (const auto& other : groups_) {
      if (other->job_store != group.job_store) continue;
      const auto found = std::ranges::find(other->global_ranks, group.global_ranks[r]);
      const auto theirs = static_cast<size_t>(found - other->global_ranks.begin());
      if (found == other->global_ranks.end() || theirs >= other->processes.size()) continue;
      if (!ended_.contains(other->processes[theirs])) continue;
      names.push_back("rank " + other->names[theirs] + " of " + other->name);
      break;
    }
  }
  return names;
}

std::vector<std::string> FailureMonitor::ended() {
  const std::lock_guard lock(mutex_);
  check_processes();
  std::vector<std::string> names;
  for (const auto& [id, process] : processes_) {
    if (ended_.contains(id)) names.push_back(process.name);
  }
  return names;
}

void FailureMonitor::await_published(const MonitoredGroup& group, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto found = stores_.find(group.job_store.get());
  if (found == stores_.end()) return;
  const std::shared_ptr<JobStore> store = found->second;
  const uint64_t next = store->begun + 1;
  wake();
  changed_.wait_for(lock, timeout,
                    [&] { return store->done >= next && store->to_publish.empty(); });
}

void FailureMonitor::await_greeting(const MonitoredGroup& group,
                                    bootstrap::KeyValue::Deadline deadline) {
  std::unique_lock lock(mutex_);
  group.require({GroupState::kMeeting}, "await_greeting()");
  const std::string& process = group.processes.front();
  changed_.wait_until(lock, deadline, [&] {
    return !wanted_connections_.contains(process) || greeted_.contains(process) ||
           ended_.contains(process) || stopping_;
  });
}

void FailureMonitor::await_connections(const MonitoredGroup& group,
                                       bootstrap::KeyValue::Deadline deadline) {
  std::unique_lock lock(mutex_);
  group.require({GroupState::kLocal, GroupState::kMonitored}, "await_connections()");
  const std::string& process = group.processes.front();
  changed_.wait_until(lock, deadline, [&] {
    return !wanted_connections_.contains(process) || ended_.contains(process) || stopping_;
  });
}

void FailureMonitor::formed(MonitoredGroup& group, const std::string& prefix, bool is_monitored,
                            std::function<void()> wake_sleepers) {
  const std::lock_guard lock(mutex_);
  group.require({GroupState::kJoining}, "formed()");
  group.wake_sleepers = std::move(wake_sleepers);
  if (is_monitored) {
    group.left_prefix = prefix + "left/";
    group.state = GroupState::kMonitored;
    open_store(group);
    for (size_t rank = 0; rank < group.processes.size(); ++rank) {
      if (ended_.contains(group.processes[rank])) {
        group.undecided.emplace(static_cast<int>(rank), Clock::now());
      }
    }
  } else {
    group.state = GroupState::kLocal;
  }
  if (group.processes.size() == 1) return;  // the group has one rank
  group.key = log_key(group.processes.front(), prefix, group.name);
  if (const auto heard = claimed_twice_.find(group.key); heard != claimed_twice_.end()) {
    apply_second_claim(group.key, heard->second);
  }
  wake();  // the thread then reads reports that arrived before this call
}

void FailureMonitor::tell_claimed_twice(const MonitoredGroup& own, const std::string& key,
                                        const std::vector<std::string>& mailboxes,
                                        const std::string& why, milliseconds timeout) {
  const FailureEntry entry{FailureKind::kClaimedTwice, key, why};
  for (const std::string& mailbox : mailboxes) ClaimMailbox::send(mailbox, format(entry));
  {
    const std::lock_guard lock(mutex_);
    open_store(own);
    publish(own, entry);
  }
  await_published(own, timeout);
}

void FailureMonitor::note_end(const MonitoredGroup& group, int rank) {
  const std::lock_guard lock(mutex_);
  if (group.state != GroupState::kStopped) mark_ended(group.processes[static_cast<size_t>(rank)]);
}

Findings FailureMonitor::findings(MonitoredGroup& group, const std::vector<int>& missing) {
  const std::lock_guard lock(mutex_);
  group.require(kFormed, "findings()");
  group.wanted.insert(missing.begin(), missing.end());
  Findings found{group.failure, group.dead, group.left, group.silent, {}};
  const auto store = stores_.find(group.job_store.get());
  if (store != stores_.end() && !store->second->was_removed &&
      Clock::now() - store->second->answered > kStoreLossGracePeriod) {
    found.store_trouble = store->second->trouble;
  }
  return found;
}

void FailureMonitor::report(MonitoredGroup& group, const std::string& failure,
                            milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    group.require(kFormed, "report()");
    if (group.state == GroupState::kStopped) return;
    publish(group, {FailureKind::kFailure, group.key, failure});
  }
  await_published(group, timeout);
}

bool FailureMonitor::finish_publishing(const MonitoredGroup& group, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  group.require(kFormed, "finish_publishing()");
  const auto found = stores_.find(group.job_store.get());
  if (found == stores_.end()) return true;
  const std::shared_ptr<JobStore> store = found->second;
  changed_.wait_for(lock, timeout, [&] {
    return store->to_publish.empty() || !store->trouble.empty() || stopping_;
  });
  return store->to_publish.empty();
}

bool FailureMonitor::leave(MonitoredGroup& group, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  group.require({GroupState::kMonitored}, "leave()");
  group.state = GroupState::kLeaving;
  wake();
  const auto is_lost = [&] {
    const auto store = stores_.find(group.job_store.get());
    return store != stores_.end() && !store->second->trouble.empty();
  };
  const auto is_over = [&] { return group.state != GroupState::kLeaving || is_lost(); };
  const auto end = Clock::now() + timeout;
  while (!changed_.wait_until(lock, std::min(end, Clock::now() + kRoundPeriod), is_over)) {
    if (Clock::now() >= end) break;
    lock.unlock();
    if (const std::exception_ptr why = interruption()) std::rethrow_exception(why);
    lock.lock();
  }
  return group.state == GroupState::kLeft;
}

void FailureMonitor::start() {
  if (thread_) return;
  if (!connections_) connections_ = std::make_unique<LivenessConnections>(bootstrap::process_id());
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  thread_ = std::make_unique<BackgroundThread>([this] { run(); },
                                               [this] {
                                                 const std::lock_guard lock(mutex_);
                                                 stopping_ = true;
                                                 changed_.notify_all();
                                                 wake();
                                               });
}

void FailureMonitor::wake() {
  if (wake_) eventfd_write(wake_.get(), 1);
}

void FailureMonitor::run() {
  std::unique_lock lock(mutex_);
  LivenessConnections& connections = *connections_;
  while (!stopping_) {
    lock.unlock();
    wait(connections);
    const std::vector<std::string> ended = connections.advance();
    lock.lock();
    for (const std::string& process : ended) {
      connected_.erase(process);
      mark_ended(process);
    }
    check_processes();
    measure_silence(connections);
    read_mail();
    connect(connections);
    if (std::exchange(wants_listener_, false)) where_ = connections.listen(listen_failure_);
    if (where_.empty()) connections.stop_listening();
    const auto stores = stores_;
    changed_.notify_all();
    lock.unlock();
    for (const auto& [keys, store] : stores) tend(*store);
    lock.lock();
    changed_.notify_all();
  }
  connections_.reset();
}

// Waits until a connection, a process or another thread needs attention, and until the next round
// at most.
void FailureMonitor::wait(const LivenessConnections& connections) {
  std::vector<pollfd> waits;
  std::optional<milliseconds> longest;
  {
    const std::lock_guard lock(mutex_);
    waits.push_back({wake_.get(), POLLIN, 0});
    if (mailbox_) waits.push_back({mailbox_->descriptor(), POLLIN, 0});
    for (const auto& [id, process] : processes_) {
      if (process.pidfd && !ended_.contains(id)) waits.push_back({process.pidfd.get(), POLLIN, 0});
    }
    if (!stores_.empty())
      longest = wanted_connections_.empty() ? kRoundPeriod : kRoundPeriodWhileConnecting;
    const auto leaves = [](const auto& group) { return group->state == GroupState::kLeaving; };
    if (longest && Clock::now() < reports_until_) {
      const auto processes = static_cast<int>(processes_.size());
      longest = std::min(
          kRoundPeriod, std::max(kRoundPeriodAfterDeath, processes * kRoundPeriodAfterDeath / 100));
    }
    if (longest && std::ranges::any_of(groups_, leaves)) longest = kRoundPeriodWhileLeaving;
  }
  connections.add_to(waits);
  poll(waits.data(), waits.size(), longest ? static_cast<int>(longest->count()) : -1);
  eventfd_t count = 0;
  eventfd_read(wake_.get(), &count);
}

void FailureMonitor::read_mail() {
  if (!mailbox_) return;
  while (const auto letter = mailbox_->receive()) {
    const auto entry = parse(*letter);
    if (entry && entry->kind == FailureKind::kClaimedTwice) apply(*entry);
  }
}

// Fails the group with this key and all groups with the same job_store: it is no longer certain
// which processes are the ranks of the job.
void FailureMonitor::apply_second_claim(const std::string& key, const std::string& why) {
  for (const auto& claimed : groups_) {
    if (claimed->key != key) continue;
    for (const auto& group : groups_) {
      if (group->job_store != claimed->job_store || group->has_second_claim) continue;
      group->claimed_twice = why;
      group->has_second_claim.store(true, std::memory_order_release);
      group->changes.fetch_add(1, std::memory_order_release);
    }
  }
}

void FailureMonitor::measure_silence(const LivenessConnections& connections) {
  for (const auto& group : groups_) {
    if (!group->is_monitored()) continue;
    for (size_t r = 0; r < group->processes.size(); ++r) {
      const auto rank = static_cast<int>(r);
      const auto silence = connections.silence(group->processes[r]);
      if (!silence || *silence <= group->heartbeat) continue;
      if (!group->silent.insert_or_assign(rank, *silence).second) continue;
      group->changes.fetch_add(1, std::memory_order_release);
      publish(*group, {FailureKind::kFailure, group->key,
                       "rank " + std::to_string(group->rank) + ": " +
                           silence_text(group->named(rank), *silence)});
    }
  }
}

// Continues to connect to the processes in wanted_connections_. REQUIRES: mutex_ is held.
void FailureMonitor::connect(LivenessConnections& connections) {
  std::erase_if(wanted_connections_, [&](const auto& wanted) {
    const auto& [process, how] = wanted;
    const bool up = connections.connected(process);
    if (!up && Clock::now() < how.until) {
      if (!connections.calling(process)) connections.call(process, how.where, how.near);
      if (connections.greeted(process)) {
        greeted_.insert(process);
      } else {
        greeted_.erase(process);
      }
      return false;
    }
    (up ? connected_ : unreachable_).insert(process);
    const auto name = processes_.find(process);
    if (!up && name != processes_.end() && !ended_.contains(process)) {
      log::warn("no connection to " + name->second.name +
                "; its death, if no other rank of its node sees it, and that of its machine show "
                "by the timeout only");
    }
    return true;
  });
}

std::string log_key(const std::string& first, const std::string& prefix, const std::string& name) {
  return first + "/" + prefix + name;
}

std::string silence_text(const std::string& rank, milliseconds silence) {
  return "the machine of " + rank + " has not answered for " +
         std::to_string(silence.count() / 1000) +
         " s: it is down, or the network to it is cut (heartbeat_timeout)";
}

}  // namespace hbm::communicator::failure
