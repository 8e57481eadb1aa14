// Handles, and the meeting of the processes that have one another's handles.
#include "bootstrap/meeting.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/handle.h"
#include "bootstrap/rendezvous.h"
#include "expect_error.h"
#include "fake_store.h"
#include "file_store.h"
#include "forked_ranks.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{60'000};

KeyValue::Deadline in(milliseconds time) { return std::chrono::steady_clock::now() + time; }

std::vector<Handle> handles(int count) {
  std::vector<Handle> made;
  for (int i = 0; i < count; ++i) made.push_back(make_handle(4000 + i));
  return made;
}

std::vector<std::string> texts_of(const std::vector<Handle>& handles) {
  std::vector<std::string> texts;
  for (const Handle& handle : handles) texts.push_back(encode(handle));
  return texts;
}

// Runs act(rank) for each rank, on a thread of its own.
void on_ranks(int size, const std::function<void(int)>& act) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(act, rank);
  for (std::thread& rank : ranks) rank.join();
}

// Returns the meeting of the member with index `rank`.
Meeting meeting(const std::vector<Handle>& members, int rank, std::shared_ptr<KeyValue> store,
                int64_t uuid = 1, milliseconds timeout = kPatience) {
  return Meeting({members, rank}, uuid, std::move(store), "group g", in(timeout));
}

// Returns the handle of a process that has died.
Handle handle_of_dead() {
  Handle handle = make_handle(1);
  const pid_t pid = fork();
  if (pid == 0) _exit(0);
  handle.process.pid = pid;
  handle.process.started = start_of(pid);
  waitpid(pid, nullptr, 0);
  return handle;
}

TEST(Handle, HasTheProcessAndItsAddresses) {
  Handle handle = make_handle(4711);
  handle.addresses = {"127.0.0.1", "10.1.2.3"};
  handle.process.host = "a \"host\" with spaces";
  const std::string text = encode(handle);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  const Handle read = decode_handle(text);
  EXPECT_EQ(read.id, handle.id);
  EXPECT_EQ(read.port, 4711);
  EXPECT_EQ(read.network, network_id());
  EXPECT_EQ(read.addresses, handle.addresses);
  EXPECT_EQ(read.process.pid, getpid());
  EXPECT_EQ(read.process.host, handle.process.host);
  EXPECT_EQ(read.process.process, process_id());
  EXPECT_FALSE(has_ended(read.process));
}

TEST(Handle, TwoOfOneProcessDiffer) { EXPECT_NE(make_handle(1).id, make_handle(1).id); }

TEST(Handle, AnotherTextIsRefused) {
  const std::string whole = encode(make_handle(1));
  for (const std::string& text :
       {std::string(), std::string("gloo:0:1:0:host:42"), whole.substr(0, whole.size() / 3),
        "x" + whole, std::string("hbm-handle-1 a b c d"), std::string(10'000, 'a')}) {
    expect_error(ErrorKind::kInvalid, {"is no handle of hbm"}, [&] { decode_handle(text); });
  }
}

TEST(Roster, APositionInAListIsTheRank) {
  const std::vector<Handle> members = handles(3);
  const Roster roster = make_roster(texts_of(members), true, members[2].id);
  EXPECT_EQ(roster.rank, 2);
  ASSERT_EQ(roster.size(), 3);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(roster.handles[i].id, members[i].id);
}

TEST(Roster, ASetHasOneOrderWithTheMembersOfAMachineTogether) {
  std::vector<Handle> members = handles(6);
  for (size_t i = 0; i < members.size(); ++i) {
    members[i].process.boot_id = i % 2 == 0 ? "even" : "odd";
  }
  std::vector<std::string> texts = texts_of(members);
  const Roster first = make_roster(texts, false, members[0].id);
  std::reverse(texts.begin(), texts.end());
  const Roster second = make_roster(texts, false, members[0].id);
  EXPECT_EQ(first.rank, second.rank);
  for (size_t i = 0; i < members.size(); ++i) {
    EXPECT_EQ(first.handles[i].id, second.handles[i].id);
    EXPECT_EQ(first.handles[i].process.boot_id, i < 3 ? "even" : "odd");
  }
}

TEST(Roster, RefusesAHandleThatStandsTwice) {
  const std::vector<Handle> members = handles(2);
  expect_error(ErrorKind::kInvalid, {"pid " + std::to_string(getpid()), "named twice"}, [&] {
    make_roster({encode(members[0]), encode(members[1]), encode(members[0])}, true, members[1].id);
  });
}

TEST(Roster, RefusesToLeaveOutThisProcess) {
  const std::vector<Handle> members = handles(2);
  expect_error(ErrorKind::kInvalid, {"none of the 2 handles is this process' present one"},
               [&] { make_roster(texts_of(members), true, make_handle(1).id); });
  expect_error(ErrorKind::kInvalid, {"none of the 0 handles"},
               [&] { make_roster({}, true, members[0].id); });
}

TEST(Meeting, AllMembersMeetAndConclude) {
  const auto store = std::make_shared<FakeStore>();
  const std::vector<Handle> members = handles(4);
  on_ranks(4, [&](int rank) {
    Meeting own = meeting(members, rank, store);
    own.meet();
    own.conclude();
    EXPECT_EQ(own.prefix(), meeting(members, 0, store).prefix());
    EXPECT_NE(own.prefix(), meeting(members, 0, store, 2).prefix());
  });
}

TEST(Meeting, DifferentHandlesAreNamedOnEveryMember) {
  const auto store = std::make_shared<FakeStore>();
  const std::vector<Handle> members = handles(3);
  const std::vector<Handle> others = {members[0], members[2], members[1]};
  on_ranks(3, [&](int rank) {
    try {
      meeting(rank == 2 ? others : members, rank, store).meet();
      ADD_FAILURE() << "rank " << rank << " met the others";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("different handles"), std::string::npos)
          << error.what();
    }
  });
}

TEST(Meeting, ADeadMemberIsNamedOnEveryMember) {
  const auto store = std::make_shared<FakeStore>();
  std::vector<Handle> members = handles(3);
  members[1] = handle_of_dead();
  const std::string name =
      "rank 1 (pid " + std::to_string(members[1].process.pid) + " on " + host_name() + ") has died";
  on_ranks(3, [&](int rank) {
    if (rank == 1) return;
    try {
      meeting(members, rank, store).meet();
      ADD_FAILURE() << "rank " << rank << " met the dead";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  });
}

// A member of another machine cannot see the death. A member that can tells it.
TEST(Meeting, ADeathIsToldToMembersOfOtherMachines) {
  const auto store = std::make_shared<FakeStore>();
  std::vector<Handle> members = handles(3);
  members[1] = handle_of_dead();
  std::vector<Handle> from_afar = members;
  for (Handle& each : from_afar) each.process.boot_id = "another machine";
  on_ranks(3, [&](int rank) {
    if (rank == 1) return;
    try {
      meeting(rank == 2 ? from_afar : members, rank, store).meet();
      ADD_FAILURE() << "rank " << rank << " met the dead";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("has died"), std::string::npos) << error.what();
    }
  });
}

TEST(Meeting, ALateMemberIsNamed) {
  const auto store = std::make_shared<FakeStore>();
  const std::vector<Handle> members = handles(3);
  on_ranks(3, [&](int rank) {
    if (rank == 1) return;
    expect_error(ErrorKind::kTimeout,
                 {"missing ranks: 1 (pid " + std::to_string(getpid()), "the same uuid?"},
                 [&] { meeting(members, rank, store, 1, milliseconds(300)).meet(); });
  });
}

TEST(Meeting, AMemberThatCannotFormTheGroupFailsTheOthers) {
  const auto store = std::make_shared<FakeStore>();
  const std::vector<Handle> members = handles(3);
  on_ranks(3, [&](int rank) {
    Meeting own = meeting(members, rank, store);
    own.meet();
    if (rank == 2) {
      own.fail("rank 2 has no memory left");
    } else {
      expect_error(ErrorKind::kUnavailable, {"rank 2 has no memory left"}, [&] { own.conclude(); });
    }
  });
}

TEST(Meeting, TheNextAttemptWorks) {
  const auto store = std::make_shared<FakeStore>();
  const std::vector<Handle> members = handles(2);
  on_ranks(2, [&](int rank) {
    Meeting first = meeting(members, rank, store, 1);
    first.meet();
    if (rank == 0) {
      first.fail("no");
    } else {
      EXPECT_THROW(first.conclude(), Error);
    }
    Meeting second = meeting(members, rank, store, 2);
    second.meet();
    second.conclude();
  });
}

// One of four processes dies before it comes, or between the meeting and its conclusion.
TEST(Meeting, AKilledProcessIsNamedByTheOthers) {
  for (const bool comes : {false, true}) {
    run_forked_ranks(
        4,
        [&](const ForkedRank& self) {
          const auto store = std::make_shared<FileStore>(self.directory);
          store->set("pid" + std::to_string(self.rank), encode(make_handle(1)), {});
          std::vector<Handle> members;
          for (int rank = 0; rank < self.size; ++rank) {
            const auto text = await_value(*store, "pid" + std::to_string(rank), in(kPatience));
            members.push_back(decode_handle(text.value()));
          }
          Meeting own = meeting(members, self.rank, store);
          if (self.rank == 3 && !comes) kill(getpid(), SIGKILL);
          const std::string name = "rank 3 (pid " + std::to_string(members[3].process.pid) + " on ";
          try {
            own.meet();
            if (self.rank == 3) kill(getpid(), SIGKILL);
            own.conclude();
            ADD_FAILURE() << "rank " << self.rank << " concluded without rank 3";
          } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
          }
        },
        {3});
  }
}

}  // namespace
}  // namespace hbm::bootstrap
