// Knows of the processes of this process' groups: who has ended, whose machine is silent, and what
// other processes have told of theirs. It alone decides that a rank has died, and only by
// proof; docs/failures.md has the states and who decides what.
//
// Processes of this node (the same kernel, PID namespace and HBMCOMM_NODE_ID) are seen by pidfd,
// whoever asks. For groups of several nodes, or without shared memory, a thread of its own sees
// those of other nodes by NodeLinks, and passes on through the store what it sees: four times a
// second, or at once when a link or a process ends. So a death has a witness even while that rank
// computes, and a store that does not answer delays nobody.
//
// Threads: every member may be called from any thread. mutex_ is never held while the store is
// asked; the links are the thread's alone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/background_thread.h"
#include "base/descriptor.h"
#include "bootstrap/key_value.h"
#include "bootstrap/rendezvous.h"
#include "communicator/failure/news_log.h"
#include "communicator/failure/node_links.h"

namespace hbm::failure {

// A rank's arguments to GroupWatch.
struct WatchSetup {
  std::string name;  // of the group, as errors have it
  int rank = 0;
  std::vector<uint64_t> global_ranks;      // by rank; empty: unknown
  std::shared_ptr<KeyValue> store;         // the group's own keys
  std::shared_ptr<KeyValue> job_store;     // one object for all groups of the job
  std::chrono::milliseconds heartbeat{0};  // the longest silence of another machine
};

// A group, as the monitor knows it.
struct MonitoredGroup : WatchSetup {
  explicit MonitoredGroup(WatchSetup setup) : WatchSetup(std::move(setup)) {}

  // Guarded by the monitor's mutex.
  std::optional<bootstrap::Member> self;
  std::vector<std::string> processes;  // by rank; empty: not met yet
  std::vector<std::string> ranks;      // by rank: "rank 3 (pid 4711 on host)"
  std::string key;                     // names the group in the news; empty: it is being made
  std::string left_prefix;             // of keys in `store`: + rank: it has left in good order
  bool spans_nodes = false;
  bool all_met = false;
  bool listens = false;  // it has told others where this process takes links
  bool followed = false;
  bool leaving = false;
  bool has_left = false;
  std::set<int> wanted;  // ranks that somebody waits for
  // Ranks whose process has ended, since when: dead, or gone in good order.
  std::map<int, std::chrono::steady_clock::time_point> undecided;
  std::set<int> dead;
  std::set<int> left;
  std::map<int, std::chrono::milliseconds> silent;  // for longer than `heartbeat`
  std::optional<std::string> failure;               // what broke it, on another rank
};

// The state of a group that an operation of it waits for.
struct Findings {
  std::optional<std::string> failure;
  std::set<int> dead;
  std::set<int> left;
  std::map<int, std::chrono::milliseconds> silent;
  std::string store_trouble;  // for a second and more; empty: none
};

// How errors tell of a machine that is silent.
std::string silence_text(const std::string& rank, std::chrono::milliseconds silence);

class FailureMonitor {
 public:
  // The monitor of this process.
  static FailureMonitor& here();

  void add(const std::shared_ptr<MonitoredGroup>& group);
  void remove(const std::shared_ptr<MonitoredGroup>& group);

  // Rank `rank` of the group is `member`; the caller itself among them.
  void meet(MonitoredGroup& group, int rank, const bootstrap::Member& member);

  // Begins to take links for a group that is being made, unless another has, and returns where.
  std::string listen(MonitoredGroup& group);

  // Takes no links any more if the group, of which all ranks have been met, needs none and no other
  // does.
  void all_met(MonitoredGroup& group);

  // Names those of `ranks` of a group in the making whose process is known to have ended. Ranks
  // that have not come are known by other groups.
  std::vector<std::string> ended(const MonitoredGroup& group, const std::vector<int>& ranks);

  // Names every process of a living group that has ended.
  std::vector<std::string> ended();

  // Waits until what is seen has been told to the other nodes, and what they have told is known, or
  // `patience` is over.
  void await_told(const MonitoredGroup& group, std::chrono::milliseconds patience);

  // Waits until the group's rank 0, if that is on another node, would see the end of this process.
  void await_greeting(const MonitoredGroup& group, KeyValue::Deadline deadline);

  // Waits until this process has its link to the group's rank 0, if that is on another node, or
  // cannot get it, which the log says once.
  void await_links(const MonitoredGroup& group, KeyValue::Deadline deadline);

  // The group has been made, under `prefix` of keys, and wants news from now on.
  void follow(MonitoredGroup& group, const std::string& prefix);

  // `missing`: the ranks that the caller waits for.
  Findings look(MonitoredGroup& group, const std::vector<int>& missing);

  void report(MonitoredGroup& group, const std::string& failure,
              std::chrono::milliseconds patience);

  // Waits until the store has all that was reported; false if it is gone, or has not in time.
  bool finish_telling(const MonitoredGroup& group, std::chrono::milliseconds patience);

  // False if the others could not be told in time.
  bool leave(MonitoredGroup& group, std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;

  struct WatchedProcess {
    std::string name;  // "rank 3 (pid 4711 on host) of group "0""
    Descriptor pidfd;  // none: on another node, or not to be had
  };
  // A store of groups over several nodes.
  struct NewsStore {
    std::shared_ptr<KeyValue> keys;
    NewsLog news;
    std::deque<News> to_tell;
    uint64_t begun = 0;   // rounds
    uint64_t done = 0;    // the last that reached the end
    std::string trouble;  // empty: none
    Clock::time_point answered = Clock::now();
    explicit NewsStore(std::shared_ptr<KeyValue> store) : keys(store), news(std::move(store)) {}
  };
  // Of the store, on a rank.
  struct Answer {
    std::shared_ptr<MonitoredGroup> group;
    int rank;
    bool has_ended;  // before the question
    bool has_left;
  };
  // A process that this one has to link to.
  struct WantedLink {
    std::string where;  // it listens
    bool near;          // in the same network namespace
    Clock::time_point until;
  };

  void look_at_processes();
  void mark_ended(const std::string& process);
  void start();
  void wake();
  void run();
  void wait(const NodeLinks& links);
  void link(NodeLinks& links);
  void drop_unused_listener();
  void measure_silence(const NodeLinks& links);
  void tend(NewsStore& store);
  std::vector<Answer> ask_who_left(KeyValue* keys);
  void tell_leaving(KeyValue* keys);
  void decide_unanswered(KeyValue* keys, Clock::time_point ended_before,
                         const std::vector<Answer>& answers);
  void decide(MonitoredGroup& group, int rank, bool has_left);
  void tell_death(const MonitoredGroup& group, size_t rank);
  void tell(const MonitoredGroup& group, News entry);
  void open_store(const MonitoredGroup& group);
  std::vector<std::shared_ptr<MonitoredGroup>> groups_of(const KeyValue* keys) const;
  void apply(const News& entry);

  std::mutex mutex_;  // guards all below, and what MonitoredGroup says
  std::condition_variable changed_;
  std::set<std::shared_ptr<MonitoredGroup>> groups_;
  std::map<std::string, WatchedProcess> processes_;  // of these groups
  std::set<std::string> ended_;                      // processes
  std::set<std::string> told_;                       // of these, in the news
  std::set<std::string> linked_;                     // processes
  std::map<std::string, WantedLink> wanted_links_;
  std::set<std::string> greeted_;      // of these, who know this process
  std::set<std::string> unreachable_;  // processes that wanted_links_ has given up
  std::map<KeyValue*, std::shared_ptr<NewsStore>> stores_;
  std::unique_ptr<NodeLinks> links_;  // the thread's alone, once that runs
  std::string where_;                 // they are taken; empty: nowhere
  bool wants_listener_ = false;       // the thread is to listen
  bool stopping_ = false;
  Descriptor wake_;  // an eventfd
  std::unique_ptr<BackgroundThread> thread_;
};

}  // namespace hbm::failure
