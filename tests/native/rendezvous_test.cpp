// The rendezvous of a group's ranks in the store, the first step of group formation.
#include "bootstrap/rendezvous.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/interruption.h"
#include "bootstrap/agreement.h"
#include "bootstrap/claim.h"
#include "bootstrap/group_transport.h"
#include "expect_error.h"
#include "fake_store.h"
#include "file_store.h"
#include "forked_ranks.h"
#include "scratch.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{60'000};

KeyValue::Deadline in(milliseconds time) { return std::chrono::steady_clock::now() + time; }

Member member() {
  Member made;
  made.version = "1.0";
  made.staging_bytes = "4096";
  made.transport = "auto";
  made.host = "host";
  made.pid = 42;
  made.boot_id = "boot";
  return made;
}

// Runs act(rank) for each rank, on a thread of its own.
void on_ranks(int size, const std::function<void(int)>& act) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(act, rank);
  for (std::thread& rank : ranks) rank.join();
}

TEST(Rendezvous, EveryRankGetsEveryRecord) {
  const auto store = std::make_shared<FakeStore>();
  on_ranks(4, [&](int rank) {
    const Rendezvous rendezvous = meet(store, rank, 4, "group g", in(kPatience), [&] {
      Member self = member();
      self.pid = 100 + rank;
      self.forced_node = "with \"quotes\"\nand lines";
      self.network_namespace = "7";
      self.segment = "ddr";
      self.listener = "listener " + std::to_string(rank);
      return self;
    });
    ASSERT_EQ(rendezvous.members.size(), 4u);
    for (int r = 0; r < 4; ++r) {
      const Member& found = rendezvous.members[static_cast<size_t>(r)];
      EXPECT_EQ(found.version, "1.0");
      EXPECT_EQ(found.staging_bytes, "4096");
      EXPECT_EQ(found.transport, "auto");
      EXPECT_EQ(found.host, "host");
      EXPECT_EQ(found.pid, 100 + r);
      EXPECT_EQ(found.process, "");
      EXPECT_EQ(found.boot_id, "boot");
      EXPECT_EQ(found.network_namespace, "7");
      EXPECT_EQ(found.forced_node, "with \"quotes\"\nand lines");
      EXPECT_EQ(found.segment, "ddr");
      EXPECT_EQ(found.listener, "listener " + std::to_string(r));
    }
  });
}

TEST(Rendezvous, DistinguishesASecondOne) {
  const auto store = std::make_shared<FakeStore>();
  on_ranks(3, [&](int rank) {
    std::set<std::string> prefixes;
    for (int round = 0; round < 5; ++round) {
      const Rendezvous rendezvous = meet(store, rank, 3, "group g", in(kPatience), [&] {
        Member self = member();
        self.pid = round;
        return self;
      });
      for (const Member& found : rendezvous.members) EXPECT_EQ(found.pid, round);
      EXPECT_TRUE(prefixes.insert(rendezvous.participant.prefix).second);
    }
  });
}

TEST(Rendezvous, DistinguishesThousands) {
  const auto store = std::make_shared<FakeStore>();
  std::set<std::string> prefixes;
  for (int round = 0; round < 3000; ++round) {
    const Rendezvous rendezvous = meet(store, 0, 1, "group g", in(kPatience), member);
    EXPECT_TRUE(prefixes.insert(rendezvous.participant.prefix).second);
  }
  EXPECT_EQ(store->keys().size(), 3000u);
}

TEST(Rendezvous, TimedOutRendezvousCounts) {
  const auto store = std::make_shared<FakeStore>();
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error(ErrorKind::kTimeout, {"missing ranks: 1"},
                 [&] { meet(store, 0, 2, "group g", in(milliseconds(50)), member); });
  }
  EXPECT_EQ(store->keys(), (std::vector<std::string>{
                               "hbm/rendezvous1/0/given_up", "hbm/rendezvous1/rendezvous/0",
                               "hbm/rendezvous2/0/given_up", "hbm/rendezvous2/rendezvous/0"}));
}

TEST(Rendezvous, LateRankFailsImmediatelyAndThenStaysInStep) {
  const auto store = std::make_shared<FakeStore>();
  const auto deadline = in(milliseconds(2000));  // so neither rank hears that the other gives up
  on_ranks(2, [&](int rank) {
    expect_error(ErrorKind::kTimeout, {"missing ranks: 2"},
                 [&] { meet(store, rank, 3, "group g", deadline, member); });
  });
  expect_error(ErrorKind::kUnavailable, {"rank 0 of group g cannot take part", "missing ranks: 2"},
               [&] { meet(store, 2, 3, "group g", in(kPatience), member); });
  on_ranks(3, [&](int rank) {
    const Rendezvous second = meet(store, rank, 3, "group g", in(kPatience), member);
    EXPECT_EQ(second.participant.prefix, "hbm/rendezvous2/0/");
  });
}

TEST(Rendezvous, FailureInALaterStepEndsOtherWaits) {
  const auto store = std::make_shared<FakeStore>();
  on_ranks(3, [&](int rank) {
    const Rendezvous rendezvous = meet(store, rank, 3, "group g", in(kPatience), member);
    Participant own = rendezvous.participant;
    if (rank == 0) return;  // never comes to the step
    if (rank == 1) {
      EXPECT_TRUE(await_keys(*store, {step_key(own, "next", 2)}, in(kPatience)));
      own.deadline = in(milliseconds(50));
    }
    expect_error(ErrorKind::kTimeout,
                 {"rank 1 of group g met 2 of 3 ranks", "(step: next)", "missing ranks: 0"}, [&] {
                   run_in_formation(own,
                                    [&] { gather(own, "next", everyone(3), [] { return ""; }); });
                 });
  });
}

// Detects no death.
class Bystander final : public RankWatch {
 public:
  void met(int /*rank*/, const Member& /*member*/) override {}
  void await_sight(KeyValue::Deadline /*deadline*/) override {}
  void check(const std::vector<int>& /*ranks*/) override {}
  std::string deaths() override { return {}; }
};

// A check for Ctrl-C. Once `interrupts` is set, the next check reports one Ctrl-C.
struct Interrupted : std::exception {};
std::atomic<bool> interrupts{false};
std::exception_ptr interrupt_once() {
  return interrupts.exchange(false) ? std::make_exception_ptr(Interrupted()) : nullptr;
}
std::exception_ptr never() { return nullptr; }

TEST(Rendezvous, InterruptedRendezvousCounts) {
  const auto meet_once = [](const std::shared_ptr<FakeStore>& store, int rank) {
    return meet(store, rank, 2, "group g", in(kPatience), member, std::make_shared<Bystander>());
  };
  const auto store = std::make_shared<FakeStore>();
  set_interruption_check(&interrupt_once);
  interrupts = true;
  EXPECT_THROW(meet_once(store, 1), Interrupted);  // only the main thread checks for Ctrl-C
  set_interruption_check(&never);
  expect_error(ErrorKind::kUnavailable,
               {"rank 1 of group g cannot take part: its wait was interrupted"},
               [&] { meet_once(store, 0); });
  on_ranks(2, [&](int rank) {
    EXPECT_EQ(meet_once(store, rank).participant.prefix, "hbm/rendezvous2/0/");
  });
}

TEST(Rendezvous, InterruptionAfterIntroductionAbortsTheFormation) {
  const auto store = std::make_shared<FakeStore>();
  const auto meet_once = [&](int rank) {
    return meet(store, rank, 3, "group g", in(kPatience), member);
  };
  const std::string why = "rank 1 of group g cannot take part: its wait was interrupted";
  std::thread waiting([&] { expect_error(ErrorKind::kUnavailable, {why}, [&] { meet_once(0); }); });
  std::thread interrupting([&] {
    for (const int rank : {0, 1}) {
      const std::string key = "hbm/rendezvous1/rendezvous/" + std::to_string(rank);
      EXPECT_TRUE(await_keys(*store, {key}, in(kPatience)));
    }
    interrupts = true;
  });
  set_interruption_check(&interrupt_once);
  EXPECT_THROW(meet_once(1), Interrupted);  // only the main thread checks for Ctrl-C
  set_interruption_check(&never);
  interrupting.join();
  waiting.join();
  expect_error(ErrorKind::kUnavailable, {why}, [&] { meet_once(2); });
  on_ranks(3,
           [&](int rank) { EXPECT_EQ(meet_once(rank).participant.prefix, "hbm/rendezvous2/0/"); });
}

TEST(Rendezvous, StartsAreComparedWithinOneTimeNamespace) {
  EXPECT_FALSE(is_restarted("1/100", "1/100"));
  EXPECT_TRUE(is_restarted("1/100", "1/101"));
  EXPECT_FALSE(is_restarted("1/100", "2/101"));
  EXPECT_FALSE(is_restarted("", "1/101"));
  EXPECT_FALSE(is_restarted("1/100", ""));
  EXPECT_FALSE(is_restarted(start_of(getpid()), start_of(getpid())));
}

TEST(Rendezvous, NamesTheRanksThatDidNotCome) {
  const auto store = std::make_shared<FakeStore>();
  const auto deadline = in(milliseconds(2000));  // so neither rank hears that the other gives up
  on_ranks(4, [&](int rank) {
    if (rank % 2 == 1) return;
    expect_error(ErrorKind::kTimeout,
                 {"rank " + std::to_string(rank) + " of group g met 2 of 4", "missing ranks: 1, 3"},
                 [&] { meet(store, rank, 4, "group g", deadline, member); });
  });
}

TEST(Rendezvous, ProblemOfOneRankReachesAll) {
  const auto store = std::make_shared<FakeStore>();
  on_ranks(3, [&](int rank) {
    if (rank == 1) {
      expect_error(ErrorKind::kExhausted, {"no memory"}, [&] {
        meet(store, rank, 3, "group g", in(kPatience),
             []() -> Member { throw Error(ErrorKind::kExhausted, "no memory"); });
      });
    } else {
      expect_error(ErrorKind::kUnavailable, {"rank 1 of group g cannot take part: no memory"},
                   [&] { meet(store, rank, 3, "group g", in(kPatience), member); });
    }
  });
}

TEST(Rendezvous, RequiresEqualFields) {
  const auto differ = [](const std::string& part, const std::function<void(Member&)>& change) {
    const auto store = std::make_shared<FakeStore>();
    on_ranks(3, [&](int rank) {
      Member self = member();
      if (rank == 1) change(self);
      expect_error(ErrorKind::kMismatch, {part, "group g", "rank 0 has", "rank 1 has"},
                   [&] { meet(store, rank, 3, "group g", in(kPatience), [&] { return self; }); });
    });
  };
  differ("the version of torch_hbmcomm", [](Member& self) { self.version = "1.1"; });
  differ("staging_bytes (the option, or HBMCOMM_STAGING_BYTES)",
         [](Member& self) { self.staging_bytes = "8192"; });
  differ("transport", [](Member& self) { self.transport = "mpi"; });
}

TEST(Rendezvous, FurtherStepsAreAmongSome) {
  const auto store = std::make_shared<FakeStore>();
  on_ranks(4, [&](int rank) {
    const Rendezvous rendezvous = meet(store, rank, 4, "group g", in(kPatience), member);
    if (rank == 1) return;
    const auto heard = gather(rendezvous.participant, "step", {0, 2, 3},
                              [&] { return std::to_string(rank * rank); });
    EXPECT_EQ(heard, (std::vector<std::string>{"0", "", "4", "9"}));
  });
}

TEST(Rendezvous, ReportsEachArrivalOnceAndEarlyOnesSoon) {
  const auto store = std::make_shared<FakeStore>();
  constexpr int kSize = 5;
  std::atomic<int> seen{0};  // each of ranks 0 to 3 adds the arrivals of ranks 0 to 3 that it sees
  on_ranks(kSize, [&](int rank) {
    if (rank == kSize - 1) {  // comes once ranks 0 to 3 have met one another
      while (seen.load() < (kSize - 1) * (kSize - 1)) std::this_thread::sleep_for(milliseconds(1));
    }
    Participant own{store, "p/", rank, kSize, "group g", in(kPatience)};
    std::vector<std::string> told(kSize);
    const auto heard = gather(
        own, "step", everyone(kSize), [&] { return "of " + std::to_string(rank); },
        [&](int other, const std::string& text) {
          std::string& place = told[static_cast<size_t>(other)];
          EXPECT_TRUE(place.empty()) << other;
          place = text;
          if (other < kSize - 1) ++seen;
        });
    EXPECT_EQ(told, heard);
  });
}

// Takes part as rank `rank` of `size`. Expects an error whose message has all `parts`.
void expect_refused(const ForkedRank& process, int rank, int size,
                    const std::vector<std::string>& parts) {
  const auto store = std::make_shared<FileStore>(process.directory);
  try {
    const Rendezvous met = meet(store, rank, size, "group g", in(kPatience), member);
    run_in_formation(met.participant, [&] {
      vouch(met.participant, kFirstCount, 0);
      held_by_all(met.participant, kFirstCount);
    });
    ADD_FAILURE() << "rank " << rank << " was not refused";
  } catch (const Error& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_TRUE(error.kind() == ErrorKind::kMismatch || error.kind() == ErrorKind::kUnavailable)
        << error.what();
  }
}

TEST(Claim, TwoProcessesWithOneRankAbortTheFormation) {
  run_forked_ranks(3, [](const ForkedRank& process) {  // as ranks 0, 1 and 1 of 3
    expect_refused(process, std::min(process.rank, 1), 3,
                   {"rank 1 of group g is taken by pid ", "two processes have this rank"});
  });
}

TEST(Claim, DoesNotMixRanksOfTwoJobs) {
  // Two jobs share a store. Process 0 waits as rank 0 of one job. Process 1 comes as rank 0 of the
  // other job. Only after process 1 was refused, process 2 comes as rank 1 of one of the jobs. All
  // three must be refused.
  run_forked_ranks(3, [](const ForkedRank& process) {
    const auto store = std::make_shared<FileStore>(process.directory);
    if (process.rank == 1) {
      EXPECT_TRUE(await_keys(*store, {"hbm/rendezvous1/rendezvous/0"}, in(kPatience)));
    }
    if (process.rank == 2) {
      EXPECT_TRUE(await_keys(*store, {"hbm/rendezvous1/0/given_up"}, in(kPatience)));
    }
    expect_refused(process, process.rank / 2, 2, {"rank 0 of group g is taken by pid "});
  });
}

TEST(Claim, RefusesTheStoreOfAnEndedJob) {
  for (const int later : {1, 2, 3}) {  // the size of the next job
    const Scratch scratch;
    std::filesystem::create_directory(scratch.store());
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(run_forked([&] {
                  const auto store = std::make_shared<FileStore>(scratch.store());
                  EXPECT_THROW(meet(store, rank, 2, "group g", in(milliseconds(1)), member), Error);
                }),
                0);
    }
    for (int rank = 0; rank < later; ++rank) {
      EXPECT_EQ(run_forked([&] {
                  const auto store = std::make_shared<FileStore>(scratch.store());
                  try {
                    meet(store, rank, later, "group g", in(kPatience), member);
                    ADD_FAILURE() << "rank " << rank << " of " << later << " met a job of the past";
                  } catch (const Error& error) {
                    if (rank > 1) return;  // only ranks 0 and 1 find records of the ended job
                    const std::string text = error.what();
                    EXPECT_NE(text.find("which has ended: the store holds the keys of another job"),
                              std::string::npos)
                        << text;
                  }
                }),
                0);
    }
  }
}

TEST(Claim, OneProcessMayClaimAgain) {
  const auto store = std::make_shared<FakeStore>();
  for (int round = 0; round < 3; ++round) {
    on_ranks(2, [&](int rank) { meet(store, rank, 2, "group g", in(kPatience), member); });
  }
}

TEST(Members, DistinguishGroupsOfOneName) {
  const auto store = std::make_shared<FakeStore>();
  for (int round = 0; round < 3; ++round) {
    on_ranks(4, [&](int number) {
      const int half = number / 2;
      const std::vector<uint64_t> members{static_cast<uint64_t>(2 * half),
                                          static_cast<uint64_t>(2 * half + 1)};
      const Rendezvous met = meet(
          store, number % 2, 2, "group g", in(kPatience),
          [&] {
            Member self = member();
            self.pid = 100 * half + number % 2;
            return self;
          },
          nullptr, members);
      EXPECT_EQ(met.members[0].pid, 100 * half);
      EXPECT_EQ(met.members[1].pid, 100 * half + 1);
      gather(met.participant, "step", everyone(2), [&] { return std::to_string(half); });
    });
  }
}

TEST(Members, DifferentListsFailOnAllRanks) {
  const auto differ = [](const std::vector<std::vector<uint64_t>>& named) {
    const auto store = std::make_shared<FakeStore>();
    on_ranks(static_cast<int>(named.size()), [&](int number) {
      const auto& own = named[static_cast<size_t>(number)];
      const auto place = std::ranges::find(own, static_cast<uint64_t>(number)) - own.begin();
      try {
        meet(store, static_cast<int>(place), static_cast<int>(own.size()), "group g", in(kPatience),
             member, nullptr, own);
        ADD_FAILURE() << "rank " << number << " formed " << list_members(own);
      } catch (const Error& error) {
        const std::string text = error.what();
        for (const auto& each : named) {
          EXPECT_NE(text.find("names the ranks " + list_members(each)), std::string::npos) << text;
        }
      }
    });
  };
  differ({{0, 1}, {0, 1, 2}, {0, 1, 2}});
  differ({{0, 1, 2}, {0, 1, 2}, {1, 2}});
  differ({{0, 1}, {1, 0}});
}

TEST(Members, ListsAreShort) {
  EXPECT_EQ(list_members({0, 1, 2}), "[0, 1, 2]");
  std::vector<uint64_t> many(64);
  std::iota(many.begin(), many.end(), 0);
  many.push_back(72);
  EXPECT_EQ(list_members(many), "[0-63, 72]");
}

TEST(Rendezvous, RanksOfOneKernelAreOnOneMachine) {
  std::vector<Member> members(5, member());
  members[1].boot_id = members[4].boot_id = "z";
  members[3].forced_node = "a";
  EXPECT_EQ(on_machine_of(0, members), (std::vector<int>{0, 2}));
  EXPECT_EQ(on_machine_of(1, members), (std::vector<int>{1, 4}));
  EXPECT_EQ(on_machine_of(3, members), (std::vector<int>{3}));
}

TEST(Introduction, NamesTheMachineOfAProcess) {
  setenv("HBMCOMM_NODE_ID", "b", 1);
  const Member self = introduce("1.0", 8192);
  unsetenv("HBMCOMM_NODE_ID");
  EXPECT_EQ(self.version, "1.0");
  EXPECT_EQ(self.pid, getpid());
  EXPECT_EQ(self.staging_bytes, "8192");
  EXPECT_EQ(self.process, process_id());
  EXPECT_EQ(self.forced_node, "b");
  EXPECT_FALSE(self.host.empty());
  EXPECT_FALSE(self.boot_id.empty());
  EXPECT_NE(self.network_namespace, "0");
  EXPECT_EQ(introduce("1.0", 8192).forced_node, "");
}

TEST(GroupTransport, FollowsTheVariable) {
  EXPECT_EQ(default_transport(), GroupTransport::kAuto);
  for (const char* name : {"mpi", "shm", "auto"}) {
    setenv("HBMCOMM_NODE", name, 1);
    EXPECT_EQ(transport_name(default_transport()), name);
  }
  setenv("HBMCOMM_NODE", "", 1);
  EXPECT_EQ(default_transport(), GroupTransport::kAuto);
  setenv("HBMCOMM_NODE", "smoke", 1);
  expect_error(ErrorKind::kInvalid, {"HBMCOMM_NODE is \"smoke\"", "\"auto\"", "\"shm\"", "\"mpi\""},
               [] { default_transport(); });
  unsetenv("HBMCOMM_NODE");
}

TEST(ProcessId, IsOfOneProcess) {
  const std::string here = process_id();
  EXPECT_EQ(here.size(), 32u);
  EXPECT_EQ(process_id(), here);
  EXPECT_NE(random_id(), here);
  EXPECT_EQ(run_forked([&] {
              EXPECT_NE(process_id(), here);
              EXPECT_EQ(process_id(), process_id());
            }),
            0);
}

}  // namespace
}  // namespace hbm::bootstrap
