// The failure monitor's reports to a group about its other ranks, and the order of these reports.
// The store is a fake.
#include "communicator/failure/failure_monitor.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/interruption.h"
#include "bootstrap/rendezvous.h"
#include "communicator/failure/failure_detector.h"
#include "expect_error.h"
#include "fake_operation.h"
#include "fake_store.h"
#include "forked_ranks.h"
#include "shm_ranks.h"

namespace hbm::communicator::failure {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout{60'000};

constexpr const char* kLogCount = "hbm/failures/count";
constexpr const char* kLeftCount = "p/left/count";
constexpr const char* kRank0Left = "p/left/0";
constexpr const char* kRank1Left = "p/left/1";
constexpr const char* kRank2Left = "p/left/2";

// A store that calls a test's hook before each get(), has() or add(), and that may be distant.
class ToldStore final : public bootstrap::KeyValue {
 public:
  using Hook = std::function<void(const std::string& key)>;

  // The time of each answer. If the deadline is earlier, the caller does not get the answer, but
  // the store does what it was asked.
  void set_round_trip(milliseconds time) { round_trip_ = time; }

  void before_get(Hook hook) { put(get_hook_, std::move(hook)); }
  void before_has(Hook hook) { put(has_hook_, std::move(hook)); }
  void before_add(Hook hook) { put(add_hook_, std::move(hook)); }

  void set(const std::string& key, const std::string& value, Deadline deadline) override {
    values_.set(key, value, deadline);
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    call(get_hook_, key);
    travel(deadline);
    return values_.get(key, deadline);
  }
  bool has(const std::vector<std::string>& keys, Deadline deadline) override {
    call(has_hook_, keys.front());
    travel(deadline);
    return values_.has(keys, deadline);
  }
  long add(const std::string& key, long amount, Deadline deadline) override {
    call(add_hook_, key);
    const long sum = values_.add(key, amount, deadline);
    travel(deadline);
    return sum;
  }
  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override {
    return values_.claim(key, value, deadline);
  }
  void remove(const std::vector<std::string>& keys) noexcept override { values_.remove(keys); }

 private:
  void put(Hook& place, Hook hook) {
    const std::lock_guard lock(mutex_);
    place = std::move(hook);
  }
  void call(const Hook& place, const std::string& key) {
    Hook hook;
    {
      const std::lock_guard lock(mutex_);
      hook = place;
    }
    if (hook) hook(key);
  }

  void travel(Deadline deadline) {
    if (round_trip_.load() == milliseconds(0)) return;
    const auto arrives = std::chrono::steady_clock::now() + round_trip_.load();
    std::this_thread::sleep_until(std::min(arrives, deadline));
    if (arrives > deadline) {
      throw bootstrap::StoreError(ErrorKind::kTimeout, "the store did not answer");
    }
  }

  FakeStore values_;
  std::atomic<milliseconds> round_trip_{milliseconds(0)};
  std::mutex mutex_;  // guards the hooks
  Hook get_hook_;
  Hook has_hook_;
  Hook add_hook_;
};

// A rank on this node: a child process that lives until it is killed.
class LocalPeer {
 public:
  LocalPeer() : pid_(fork()) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pause();
    _exit(0);
  }
  ~LocalPeer() {
    kill();
    waitpid(pid_, nullptr, 0);
  }
  LocalPeer(const LocalPeer&) = delete;
  LocalPeer& operator=(const LocalPeer&) = delete;

  void kill() const { ::kill(pid_, SIGKILL); }

  bootstrap::Member member() const {
    bootstrap::Member found = bootstrap::introduce("1", 0);
    found.pid = pid_;
    found.process = "neighbour " + std::to_string(pid_);
    found.started = bootstrap::start_of(pid_);
    return found;
  }

 private:
  const pid_t pid_;
};

// Rank 0 of three. Rank 1 is on another node, rank 2 on rank 0's node.
struct Watched {
  std::shared_ptr<ToldStore> store = std::make_shared<ToldStore>();
  LocalPeer rank_2;
  FailureDetector detector;
  progress::FakeOperation operation;

  explicit Watched(const std::vector<int>& missing,
                   bootstrap::StoreServer server = bootstrap::StoreServer::kAnotherRank,
                   milliseconds parting = kTimeout)
      : detector({.name = "group g",
                  .rank = 0,
                  .global_ranks = {},
                  .store = store,
                  .job_store = store,
                  .heartbeat = milliseconds(10'000),
                  .server = server},
                 parting),
        operation(script_of(missing)) {
    bootstrap::Member elsewhere = bootstrap::introduce("1", 0);
    elsewhere.process = "elsewhere";
    elsewhere.boot_id = "another";
    detector.met(0, bootstrap::introduce("1", 0));
    detector.met(1, elsewhere);
    detector.met(2, rank_2.member());
    detector.all_met();
    detector.formed("p/", nullptr);
  }

  static std::shared_ptr<progress::Script> script_of(const std::vector<int>& missing) {
    auto made = progress::script("allreduce #1");
    made->missing = missing;
    return made;
  }

  void tell(const std::string& entry) const {
    const long number = store->add(kLogCount, 1, {});
    store->set("hbm/failures/" + std::to_string(number), entry, {});
  }
  // Publishes a failure of the group, as another rank does.
  void tell_failure(const std::string& text) const {
    tell("failure\n" + bootstrap::process_id() + "/p/group g\n" + text);
  }
  void leave_rank_1() const { store->set(kRank1Left, "1", {}); }

  void await_error(ErrorKind kind, const std::string& part) {
    const auto end = std::chrono::steady_clock::now() + kTimeout;
    while (std::chrono::steady_clock::now() < end) {
      try {
        detector.check(operation);
      } catch (const Error&) {
        expect_error(kind, {part}, std::current_exception());
        return;
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    ADD_FAILURE() << "no error with \"" << part << '"';
  }
};

TEST(FailureMonitor, ErrorNamesADepartedRank) {
  Watched group({1});
  group.leave_rank_1();
  group.await_error(ErrorKind::kPeer, "was destroyed on a rank that this one waits for, rank 1");
}

// Checks the group's operation once, between two questions of the failure monitor to the store. The
// first question is whether a rank has left. The second reads the failure log.
class LookBetween {
 public:
  // `question`: the key that exists once the rank has left. `before` is called once, before the
  // store answers whether this key exists.
  LookBetween(Watched& group, const char* question, const std::function<void()>& before) {
    group.store->before_has([state = state_, question, before](const std::string& key) {
      if (key == question && !state->asked.exchange(true)) before();
    });
    group.store->before_get([state = state_, &group](const std::string& key) {
      if (key != kLogCount || !state->asked || state->looks.exchange(true)) return;
      try {
        group.detector.check(group.operation);
      } catch (const Error&) {
        state->seen = std::current_exception();
      }
      state->looked = true;
    });
  }

  // Waits for the check. Returns the text of the error that the check threw, or "no error".
  std::string await() const {
    const auto end = std::chrono::steady_clock::now() + kTimeout;
    while (!state_->looked && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return state_->looked ? text_of(state_->seen) : "it has not looked";
  }

 private:
  struct State {
    std::atomic<bool> asked = false;
    std::atomic<bool> looks = false;
    std::exception_ptr seen;
    std::atomic<bool> looked = false;  // set after `seen`
  };
  const std::shared_ptr<State> state_ =
      std::make_shared<State>();  // the store may call the hooks after this object's end
};

// The monitor knows that rank 1 has left before it reads rank 1's entry in the failure log. A check
// between the two finds no error. A later check throws the cause that the entry gives.
TEST(FailureMonitor, ErrorHasADepartedRanksCause) {
  Watched group({1});
  const LookBetween look(group, kRank1Left, [&] {
    group.tell_failure("rank 1: it is tired");
    group.leave_rank_1();
  });
  group.await_error(ErrorKind::kPeer, "it is tired");
  EXPECT_EQ(look.await(), "no error");
}

// Rank 2 publishes a failure and ends, as a process ends if its code does not catch the error.
TEST(FailureMonitor, ErrorHasAnEndedRanksCause) {
  Watched group({2});
  const LookBetween look(group, kRank2Left, [&] { group.tell_failure("rank 2: it is tired"); });
  group.rank_2.kill();
  EXPECT_EQ(look.await(), "no error");
  group.await_error(ErrorKind::kPeer, "it is tired");
}

TEST(FailureMonitor, LeavingAFailedGroupPublishesFirst) {
  Watched group({1});
  std::promise<void> leaves;
  group.store->before_add([left = leaves.get_future().share()](const auto&) {
    left.wait();
    std::this_thread::sleep_for(milliseconds(50));  // so that finish_reports() has to wait
  });
  group.detector.report_failure(Error(ErrorKind::kTimeout, "it is tired"));
  EXPECT_FALSE(group.store->has({"hbm/failures/1"}, {}));
  leaves.set_value();
  group.detector.finish_reports();
  EXPECT_TRUE(group.store->has({"hbm/failures/1"}, {}));
}

// Rank 1 serves the store, leaves its last group and ends. Later an operation of rank 0 waits for
// rank 1. The operation fails without a question to the store, because the store has ended with
// rank 1.
TEST(FailureMonitor, DoesNotQueryAClosedStore) {
  Watched group({1});
  group.tell("closing\n" + bootstrap::process_id() + "/p/group g\n1");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!group.store->has({kLeftCount}, {})) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(group.store->get(kLeftCount, {}), "1");
  const auto questions = std::make_shared<std::atomic<int>>(0);
  const auto count = [questions](const auto&) { ++*questions; };
  group.store->before_get(count);
  group.store->before_has(count);
  group.store->before_add(count);
  group.await_error(ErrorKind::kPeer, "was destroyed on a rank that this one waits for, rank 1");
  group.detector.report_failure(
      Error(ErrorKind::kTimeout, "it is tired"));  // with an open store, it would be published
  group.detector.finish_reports();
  group.detector.stop();
  EXPECT_EQ(*questions, 0);
}

// The store's server has died. A death among the other ranks makes rounds frequent, but not the
// questions to the lost store.
TEST(FailureMonitor, AsksALostStoreEverLessOften) {
  Watched group({1});
  const auto questions = std::make_shared<std::atomic<int>>(0);
  const auto lost = [questions](const auto&) {
    ++*questions;
    throw bootstrap::StoreError(ErrorKind::kNetwork, "the store is gone");
  };
  group.store->before_get(lost);
  group.store->before_has(lost);
  group.store->before_add(lost);
  const auto begun = std::chrono::steady_clock::now();
  group.rank_2.kill();
  group.await_error(ErrorKind::kNetwork, "the store is gone");
  std::this_thread::sleep_for(milliseconds(1500));
  group.detector.stop();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begun;
  // The pauses are a quarter of a second, half a second, a second, and so on.
  EXPECT_LE(*questions, 2 + std::log2(time.count() / 0.25 + 1));
}

// Rank 0 serves the store. So its leave() returns only once each other rank has left or has died.
TEST(FailureMonitor, StoreServerLeavesLast) {
  Watched group({}, bootstrap::StoreServer::kThisProcess);
  std::atomic<bool> has_left = false;
  std::thread leaving([&] {
    group.detector.leave(/*all_came=*/false);
    has_left = true;
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!group.store->has({"hbm/failures/1"}, {}) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  const std::string entry = group.store->get("hbm/failures/1", {}).value_or("");
  EXPECT_TRUE(entry.starts_with("closing\n")) << entry;
  EXPECT_FALSE(has_left);
  group.store->add(kLeftCount, 1, {});  // as if rank 1 left
  EXPECT_FALSE(has_left);
  group.rank_2.kill();
  leaving.join();
  for (const char* key : {kLeftCount, kRank0Left, kRank1Left})
    EXPECT_FALSE(group.store->has({key}, {}));
}

// The rank that serves the store waits until the others have counted themselves, so they continue
// to try.
TEST(FailureMonitor, WaitsForASlowStoreIfAllRanksLeave) {
  Watched group({}, bootstrap::StoreServer::kAnotherRank, /*parting=*/milliseconds(0));
  const auto answers = std::chrono::steady_clock::now() + milliseconds(500);
  group.store->before_add([answers](const auto&) {
    if (std::chrono::steady_clock::now() >= answers) return;
    bootstrap::StoreError error(ErrorKind::kTimeout, "the store did not answer");
    error.never_asked = true;
    throw error;
  });
  group.detector.leave(/*all_came=*/true);
  EXPECT_TRUE(group.store->has({kRank0Left}, {}));
  EXPECT_EQ(group.store->get(kLeftCount, {}), "1");
}

// Each answer takes the round trip of the link, and comes too late for the first rounds or for all
// questions of a round together. Rank 0 also reads an entry of the log.
TEST(FailureMonitor, LeavesOverADistantStore) {
  for (const milliseconds round_trip : {milliseconds(150), milliseconds(900)}) {
    Watched group({}, bootstrap::StoreServer::kAnotherRank, /*parting=*/milliseconds(0));
    group.store->set("hbm/failures/1", "closing\nanother group\n1", {});
    group.store->set(kLogCount, "1", {});
    group.store->set_round_trip(round_trip);
    group.detector.leave(/*all_came=*/true);
    group.store->set_round_trip(milliseconds(0));
    EXPECT_TRUE(group.store->has({kRank0Left}, {})) << round_trip.count();
    EXPECT_EQ(group.store->get(kLeftCount, {}), "1") << round_trip.count();
  }
}

TEST(FailureMonitor, CtrlCEndsTheWaitForASlowStore) {
  struct Interrupted {};
  Watched group({}, bootstrap::StoreServer::kAnotherRank);
  group.store->before_add([](const auto&) {
    throw bootstrap::StoreError(ErrorKind::kTimeout, "the store did not answer");
  });
  group.store->before_get([](const auto&) {
    throw bootstrap::StoreError(ErrorKind::kTimeout, "the store did not answer");
  });
  set_interruption_check([] { return std::make_exception_ptr(Interrupted()); });
  EXPECT_THROW(group.detector.leave(/*all_came=*/true), Interrupted);
  set_interruption_check(nullptr);
}

// No rank serves the store, so the last rank to leave removes the keys.
TEST(FailureMonitor, LastRankToLeaveRemovesTheKeys) {
  for (const long others : {1, 2}) {
    Watched group({}, bootstrap::StoreServer::kNoRank);
    group.leave_rank_1();
    group.store->add(kLeftCount, others, {});
    group.detector.leave(/*all_came=*/false);
    for (const char* key : {kLeftCount, kRank0Left, kRank1Left}) {
      EXPECT_EQ(group.store->has({key}, {}), others == 1) << key;
    }
  }
}

TEST(FailureMonitor, NamesADeadRankBeforeDepartedRanks) {
  Watched group({1, 2});
  group.rank_2.kill();
  group.leave_rank_1();
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (group.detector.dead().empty() || group.detector.left({1}).empty()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(milliseconds(1));
  }
  expect_error(ErrorKind::kDeath, {"allreduce #1: rank 2 (pid ", " has died"},
               [&] { group.detector.check(group.operation); });
}

const std::vector<GroupState> kStates = {
    GroupState::kMeeting, GroupState::kJoining, GroupState::kLocal,  GroupState::kMonitored,
    GroupState::kLeaving, GroupState::kLeft,    GroupState::kStopped};

// Returns a group in `state`. This process is its rank 0. Its rank 1 is `peer`. Without a peer,
// rank 1 is on another node, except in kLocal, where the group has one rank.
std::shared_ptr<MonitoredGroup> group_in(GroupState state, const LocalPeer* peer = nullptr) {
  FailureMonitor& monitor = FailureMonitor::here();
  const auto store = std::make_shared<FakeStore>();
  const auto group = std::make_shared<MonitoredGroup>(
      GroupFacts{.name = "group g",
                 .rank = 0,
                 .global_ranks = {},
                 .store = store,
                 .job_store = store,
                 .heartbeat = milliseconds(10'000),
                 .server = bootstrap::StoreServer::kThisProcess});  // so this rank leaves last
  monitor.add(group);
  monitor.meet(*group, 0, bootstrap::introduce("1", 0));
  if (peer != nullptr) {
    monitor.meet(*group, 1, peer->member());
  } else if (state != GroupState::kLocal) {
    bootstrap::Member elsewhere = bootstrap::introduce("1", 0);
    elsewhere.process = "elsewhere";
    elsewhere.boot_id = "another";
    monitor.meet(*group, 1, elsewhere);
  }
  if (state == GroupState::kMeeting) return group;
  monitor.all_met(*group);
  if (state == GroupState::kJoining) return group;
  monitor.formed(*group, "p/", state != GroupState::kLocal, nullptr);
  if (state == GroupState::kLeft) store->add(kLeftCount, 1, {});
  if (state == GroupState::kLeaving) {
    EXPECT_FALSE(monitor.leave(*group, milliseconds(0)));
  }
  if (state == GroupState::kLeft) {
    EXPECT_TRUE(monitor.leave(*group, kTimeout));
  }
  if (state == GroupState::kStopped) monitor.remove(group);
  return group;
}

// monitored_group.h describes the states, and which calls each state allows.
TEST(FailureMonitor, RefusesCallsThatTheStateForbids) {
  struct Call {
    const char* name;
    std::set<GroupState> legal;
    std::function<void(FailureMonitor&, MonitoredGroup&)> make;
  };
  const std::set<GroupState> forming = {GroupState::kMeeting};
  const std::set<GroupState> formed = {GroupState::kLocal, GroupState::kMonitored,
                                       GroupState::kLeaving, GroupState::kLeft,
                                       GroupState::kStopped};
  const auto now = std::chrono::steady_clock::now();
  const std::vector<Call> calls = {
      {"prepare()", forming, [](auto& monitor, auto& group) { monitor.prepare(group); }},
      {"meet()", forming,
       [](auto& monitor, auto& group) { monitor.meet(group, 0, bootstrap::introduce("1", 0)); }},
      {"await_greeting()", forming,
       [&](auto& monitor, auto& group) { monitor.await_greeting(group, now); }},
      {"all_met()", forming, [](auto& monitor, auto& group) { monitor.all_met(group); }},
      {"formed()",
       {GroupState::kJoining},
       [](auto& monitor, auto& group) { monitor.formed(group, "p/", true, nullptr); }},
      {"await_connections()",
       {GroupState::kLocal, GroupState::kMonitored},
       [&](auto& monitor, auto& group) { monitor.await_connections(group, now); }},
      {"findings()", formed, [](auto& monitor, auto& group) { monitor.findings(group, {}); }},
      {"report()", formed,
       [](auto& monitor, auto& group) { monitor.report(group, "tired", milliseconds(0)); }},
      {"finish_publishing()", formed,
       [](auto& monitor, auto& group) { monitor.finish_publishing(group, milliseconds(0)); }},
      {"leave()", {GroupState::kMonitored}, [](auto& monitor, auto& group) {
         monitor.leave(group, milliseconds(0));
       }}};
  FailureMonitor& monitor = FailureMonitor::here();
  for (const Call& call : calls) {
    for (const GroupState state : kStates) {
      const auto group = group_in(state);
      std::string refusal;
      try {
        call.make(monitor, *group);
      } catch (const std::logic_error& error) {
        refusal = error.what();
      }
      EXPECT_EQ(refusal.empty(), call.legal.contains(state))
          << call.name << " in state " << static_cast<int>(state) << ": " << refusal;
      if (!refusal.empty()) {
        EXPECT_NE(refusal.find(call.name), std::string::npos) << refusal;
        EXPECT_TRUE(refusal.ends_with(" of group g")) << refusal;
      }
      monitor.remove(group);
      monitor.remove(group);  // idempotent
    }
  }
}

// A sleeping operation need not wait for its next check.
TEST(FailureMonitor, WakesTheGroupOfAnEndedProcess) {
  FailureMonitor& monitor = FailureMonitor::here();
  const LocalPeer peer;
  const auto group = group_in(GroupState::kMeeting, &peer);
  monitor.prepare(*group);
  monitor.all_met(*group);
  std::promise<void> woken;
  monitor.formed(*group, "p/", false, [&] { woken.set_value(); });
  peer.kill();
  EXPECT_EQ(woken.get_future().wait_for(kTimeout), std::future_status::ready);
  monitor.remove(group);
  EXPECT_FALSE(group->wake_sleepers);
}

// A rank sees a death by the life sign before the process has ended. Here the process never ends.
TEST(FailureMonitor, PublishesADeathThatARankHasFound) {
  FailureMonitor& monitor = FailureMonitor::here();
  const LocalPeer peer;
  const auto group = group_in(GroupState::kMonitored, &peer);
  monitor.note_end(*group, 1);
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (!monitor.findings(*group, {}).dead.contains(1)) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(milliseconds(1));
  }
  monitor.await_published(*group, kTimeout);
  EXPECT_EQ(group->store->get("hbm/failures/1", {}),
            "death\n" + peer.member().process + "\n" + group->named(1));
  monitor.remove(group);
}

// poll() refuses more entries than this process may have descriptors.
TEST(FailureMonitor, FindsADeathAmongMoreProcessesThanDescriptors) {
  EXPECT_EQ(run_forked([] {
              rlimit limit{};
              ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
              limit.rlim_cur = 64;
              ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
              FailureMonitor& monitor = FailureMonitor::here();
              const LocalPeer peer;
              const auto group = group_in(GroupState::kMeeting, &peer);
              bootstrap::Member elsewhere = bootstrap::introduce("1", 0);
              elsewhere.boot_id = "another";
              for (int rank = 2; rank < 100; ++rank) {
                elsewhere.process = "elsewhere " + std::to_string(rank);
                monitor.meet(*group, rank, elsewhere);
              }
              peer.kill();
              while (monitor.ended(*group, {1}).empty()) {
                std::this_thread::sleep_for(milliseconds(1));
              }
            }),
            0);
}

TEST(FailureDetector, RefusesQuestionsBeforeTheGroupIsFormed) {
  FailureDetector detector({.name = "group g",
                            .rank = 0,
                            .global_ranks = {},
                            .store = nullptr,
                            .job_store = nullptr,
                            .heartbeat = milliseconds(10'000)});
  detector.met(0, bootstrap::introduce("1", 0));
  detector.all_met();
  EXPECT_THROW(detector.dead(), std::logic_error);
  detector.formed("p/", nullptr);
  EXPECT_EQ(detector.dead(), std::vector<int>());
}

// The sender dies after the receiver's last poll.
TEST(FailureDetector, AcceptsTheMessageOfADeadLocalRank) {
  shm::TestNode node({.size = 2});
  shm::NodeRank receiver(node, 0), sender(node, 1);
  FailureDetector detector({.name = "group g",
                            .rank = 0,
                            .global_ranks = {},
                            .store = nullptr,
                            .job_store = nullptr,
                            .heartbeat = milliseconds(10'000)});
  for (const int rank : {0, 1}) detector.met(rank, bootstrap::introduce("1", 0));
  detector.all_met();
  detector.formed("p/", receiver.shm_group);

  float received = 0, sent = 2;
  const auto receive = receiver.collectives->receive({&received, 1}, Dtype::kFloat32, 1, 0,
                                                     std::make_shared<int>(kAnyRank));
  receive->begin();
  EXPECT_EQ(receive->poll(), progress::Progress::kIdle);
  EXPECT_FALSE(sender.transfer(sender.collectives->send({&sent, 1}, Dtype::kFloat32, 0, 0)));
  sender.die();
  EXPECT_NO_THROW(detector.check(*receive));
  EXPECT_FALSE(receiver.shm_group->failed());
  EXPECT_EQ(receive->poll(), progress::Progress::kDone);
  EXPECT_EQ(received, sent);
  receiver.shm_group->report("rank 0: it is tired", /*death=*/false);
  expect_error(ErrorKind::kPeer, {"it is tired"}, [&] { detector.check(*receive); });
}

// A monitored barrier asks which ranks are dead, and waits for rank 0 only. Ranks of other nodes
// then learn of the death too.
TEST(FailureDetector, PublishesADeathThatItReturns) {
  shm::TestNode node({.size = 2});
  shm::NodeRank own(node, 0), other(node, 1);
  const auto store = std::make_shared<FakeStore>();
  FailureDetector detector({.name = "group g",
                            .rank = 0,
                            .global_ranks = {},
                            .store = store,
                            .job_store = store,
                            .heartbeat = milliseconds(10'000)});
  detector.met(0, bootstrap::introduce("1", 0));
  for (const int rank : {1, 2}) {
    bootstrap::Member member = bootstrap::introduce("1", 0);
    member.process = bootstrap::random_id();  // the monitor remembers processes that have ended
    if (rank == 2) member.boot_id = "another";
    detector.met(rank, member);
  }
  detector.all_met();
  detector.formed("p/", own.shm_group);
  shm::control_of(node.regions[1]).life.holder = FUTEX_OWNER_DIED;
  EXPECT_EQ(detector.dead(), std::vector<int>{1});
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (!store->has({"hbm/failures/1"}, {})) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(store->get("hbm/failures/1", {})->starts_with("death\n"));
}

}  // namespace
}  // namespace hbm::communicator::failure
