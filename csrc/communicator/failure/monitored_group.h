// A group of processes, as the failure monitor knows it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/key_value.h"
#include "bootstrap/rendezvous.h"

namespace hbm::failure {

// A rank's arguments to GroupWatch.
struct WatchSetup {
  std::string name;  // of the group, as errors have it
  int rank = 0;
  std::vector<uint64_t> global_ranks;         // by rank; empty: unknown
  std::shared_ptr<KeyValue> store;            // the group's own keys
  std::shared_ptr<KeyValue> job_store;        // one object for all groups of the job
  std::chrono::milliseconds heartbeat{0};     // the longest silence of another machine
  StoreServer server = StoreServer::kNoRank;  // of the stores
};

struct MonitoredGroup : WatchSetup {
  explicit MonitoredGroup(WatchSetup setup) : WatchSetup(std::move(setup)) {}

  // Guarded by the monitor's mutex.
  std::optional<bootstrap::Member> self;
  std::vector<std::string> processes;  // by rank; empty: not met yet
  std::vector<std::string> ranks;      // by rank: "rank 3 (pid 4711 on host)"
  std::string key;                     // names the group in the log; empty: it is being made
  std::string left_prefix;             // of keys in `store`: + rank: it has left in good order
                                       // + "count": ranks that ask the store no more
  bool spans_nodes = false;
  bool all_met = false;
  bool listens = false;  // it has told others where this process takes links
  bool followed = false;
  bool leaving = false;
  bool has_left = false;
  bool store_closes = false;  // the rank that serves it has published that it leaves its last group
  bool counted = false;       // this rank, among those that ask the store no more
  std::set<int> wanted;       // ranks that somebody waits for
  // Ranks whose process has ended, since when: dead, or gone in good order.
  std::map<int, std::chrono::steady_clock::time_point> undecided;
  std::set<int> dead;
  std::set<int> left;
  std::map<int, std::chrono::milliseconds> silent;  // for longer than `heartbeat`
  std::optional<std::string> failure;               // what broke it, on another rank
  std::string claimed_twice;  // how another process came as one of its ranks; empty: none did
  // Set, for good, once claimed_twice is. Read without the mutex: a hint to take it.
  std::atomic<bool> has_second_claim = false;
};

}  // namespace hbm::failure
