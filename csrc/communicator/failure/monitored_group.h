// A group of processes, as the failure monitor knows it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/key_value.h"
#include "bootstrap/rendezvous.h"

namespace hbm::communicator::failure {

// The states of a group in this process, and the calls of FailureMonitor that change them:
//
//    add()
//      |                                            formed(), all ranks share memory
//      v        all_met()               formed()   .------------------------------> kLocal
//   kMeeting ------------> kJoining ---------------+
//                                                  '--> kMonitored
//                                                           |  leave()
//                                                           v
//                                                       kLeaving
//                                                           |  the thread has published it
//                                                           v
//                                                         kLeft
//
//   remove() changes every state to kStopped.
//
// prepare(), meet() and await_greeting() are legal only in kMeeting, and await_connections() only
// in kLocal and kMonitored. findings(), report() and finish_publishing() are legal from formed()
// on. In kStopped they are legal too, but report() then publishes nothing. Each of these calls, and
// all_met(), formed() and leave(), throws std::logic_error in any other state. The error names the
// group, the call and the state.
enum class GroupState { kMeeting, kJoining, kLocal, kMonitored, kLeaving, kLeft, kStopped };

// A rank's arguments to FailureDetector.
struct GroupFacts {
  std::string name;  // of the group, as errors have it
  int rank = 0;
  std::vector<uint64_t> global_ranks;              // by rank; empty: unknown
  std::shared_ptr<bootstrap::KeyValue> store;      // the group's own keys
  std::shared_ptr<bootstrap::KeyValue> job_store;  // one object for all groups of the job
  std::chrono::milliseconds heartbeat{0};          // another machine may be silent for this time
  bootstrap::StoreServer server = bootstrap::StoreServer::kNoRank;  // of `store` and `job_store`
};

struct MonitoredGroup : GroupFacts {
  explicit MonitoredGroup(GroupFacts facts) : GroupFacts(std::move(facts)) {}

  // Throws std::logic_error unless the group is in one of the `legal` states of `call`. REQUIRES:
  // the monitor's mutex is held.
  void require(std::initializer_list<GroupState> legal, const char* call) const;

  // Returns true between formed() and remove(), if some rank does not share this rank's memory.
  // REQUIRES: the monitor's mutex is held.
  bool is_monitored() const {
    return state == GroupState::kMonitored || state == GroupState::kLeaving ||
           state == GroupState::kLeft;
  }

  // "rank 3 (pid 4711 on host)".
  std::string named(int r) const { return "rank " + names[static_cast<size_t>(r)]; }

  // Constant from all_met() on; guarded by the monitor's mutex before.
  std::vector<std::string> processes;  // by rank; empty: not met yet
  std::vector<std::string> names;      // by rank: "3 (pid 4711 on host)"

  // Guarded by the monitor's mutex.
  GroupState state = GroupState::kMeeting;
  std::optional<bootstrap::Member> self;
  std::string key;  // names the group in the log; empty: being formed, or has one rank
  // The prefix of two kinds of keys in `store`. A rank that leaves sets the key that ends in its
  // number. The key that ends in "count" has the number of ranks that ask the store no more about
  // this group.
  std::string left_prefix;
  // Wakes the threads of this process that sleep in an operation; empty: none share memory.
  std::function<void()> wake_sleepers;
  bool spans_nodes = false;
  bool listens = false;       // the group needs this process's listener for liveness connections
  bool store_closes = false;  // the rank that serves the store has published that it leaves
  bool counted = false;       // this rank has added itself to "count"
  std::set<int> wanted;       // ranks that an operation waits for
  // Ranks whose process has ended, and when this was noticed. It is not known yet whether they died
  // or had left in good order.
  std::map<int, std::chrono::steady_clock::time_point> undecided;
  std::set<int> dead;
  std::set<int> left;
  std::map<int, std::chrono::milliseconds> silent;  // for longer than `heartbeat`
  std::optional<std::string> failure;  // the failure that broke the group, on another rank
  // The second claim of one of its ranks. Constant after has_second_claim has been set.
  std::string claimed_twice;
  std::atomic<bool> has_second_claim = false;
  // Incremented, under the mutex, after a rank has entered `silent`, `dead` or `left`, or after
  // `failure` or `has_second_claim` was set. Any thread reads it without the mutex.
  std::atomic<uint64_t> changes = 0;
};

}  // namespace hbm::communicator::failure
