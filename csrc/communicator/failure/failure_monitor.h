// Watches the processes of all groups of this process. It alone decides that a rank has died, and
// only by proof. docs/failures.md has the states of a rank.
//
// A pidfd shows the end of a process of this node (the same kernel, PID namespace and
// HBMCOMM_NODE_ID). From the first group of several ranks on, the monitor has a thread, which hears
// of second claims. For groups of several nodes, or without shared memory, the thread also sees the
// ends of processes on other nodes by NodeLinks, and exchanges entries of the failure log through
// the store: four times a second, or immediately when a link or a process ends. So a death has a
// witness even while that rank computes, and a store that does not answer delays no caller.
//
// Threads: every member may be called from any thread. mutex_ is never held while the store is
// asked, which tend() alone does, in the thread (store_round.cpp); the links are the thread's
// alone.
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
#include <vector>

#include "base/background_thread.h"
#include "base/descriptor.h"
#include "bootstrap/key_value.h"
#include "bootstrap/rendezvous.h"
#include "communicator/failure/failure_log.h"
#include "communicator/failure/mailbox.h"
#include "communicator/failure/monitored_group.h"
#include "communicator/failure/node_links.h"

namespace hbm::failure {

// The state of a group that an operation of it waits for.
struct Findings {
  std::optional<std::string> failure;
  std::set<int> dead;
  std::set<int> left;
  std::map<int, std::chrono::milliseconds> silent;
  std::string store_trouble;  // for a second and more; empty: none
};

// Returns the name of a group in failure reports. `first`: the process of its rank 0. `prefix`: of
// its keys.
std::string log_key(const std::string& first, const std::string& prefix, const std::string& name);

// How errors tell of a machine that is silent.
std::string silence_text(const std::string& rank, std::chrono::milliseconds silence);

class FailureMonitor {
 public:
  // The monitor of this process.
  static FailureMonitor& here();

  // A new group, in the state kMeeting. The calls that follow throw std::logic_error in a state of
  // the group in which they are not legal.
  void add(const std::shared_ptr<MonitoredGroup>& group);

  // Idempotent, and legal in every state.
  void remove(const std::shared_ptr<MonitoredGroup>& group);

  // Rank `rank` of the group is `member`; the caller itself among them.
  void meet(MonitoredGroup& group, int rank, const bootstrap::Member& member);

  // Starts the thread, for second claims. Rank 0 of a group also begins to take links, unless
  // another group has, and returns where. Throws std::system_error if no thread is left.
  std::string prepare(MonitoredGroup& group);

  // All ranks have been met. Closes the listener for links unless this group or another needs it.
  void all_met(MonitoredGroup& group);

  // Names those of `ranks` of a group in the making whose process is known to have ended. Ranks
  // that have not come are known by other groups.
  std::vector<std::string> ended(const MonitoredGroup& group, const std::vector<int>& ranks);

  // Names every process of a living group that has ended.
  std::vector<std::string> ended();

  // Waits until this process has published all its entries and has read the failure log, or
  // `patience` is over.
  void await_published(const MonitoredGroup& group, std::chrono::milliseconds patience);

  // Waits until the group's rank 0, if that is on another node, would see the end of this process.
  void await_greeting(const MonitoredGroup& group, KeyValue::Deadline deadline);

  // Waits until this process has its link to the group's rank 0, if that is on another node, or
  // cannot get it, which the log says once.
  void await_links(const MonitoredGroup& group, KeyValue::Deadline deadline);

  // The group has been made, under `prefix` of keys. From now on it hears of a second process that
  // comes as one of its ranks. If `is_monitored`, it also follows the failure log.
  void formed(MonitoredGroup& group, const std::string& prefix, bool is_monitored);

  // Tells a group, which this process is none of, that it has come as one of its ranks.
  void tell_claimed_twice(const MonitoredGroup& own, const std::string& key,
                          const std::vector<std::string>& mailboxes, const std::string& why,
                          std::chrono::milliseconds patience);

  // `missing`: the ranks that the caller waits for.
  Findings look(MonitoredGroup& group, const std::vector<int>& missing);

  // Publishes the cause that has broken the group; waits until the store has it, or `patience` is
  // over.
  void report(MonitoredGroup& group, const std::string& failure,
              std::chrono::milliseconds patience);

  // Waits until the store has all that was reported; false if it is gone, or has not in time.
  bool finish_publishing(const MonitoredGroup& group, std::chrono::milliseconds patience);

  // False if the others could not be told in time.
  bool leave(MonitoredGroup& group, std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;

  struct WatchedProcess {
    std::string name;  // "rank 3 (pid 4711 on host) of group "0""
    Descriptor pidfd;  // none: on another node, or not to be had
  };
  // A process that this one has to link to.
  struct WantedLink {
    std::string where;  // it listens
    bool near;          // in the same network namespace
    Clock::time_point until;
  };
  // One store: its failure log, and the state of its rounds. Guarded by mutex_, except `log` and
  // `to_remove`, which are the thread's alone.
  struct JobStore {
    explicit JobStore(const std::shared_ptr<KeyValue>& store) : keys(store.get()), log(store) {}
    const KeyValue* const keys;
    FailureLog log;
    // Groups that this process has left, and whose keys of leaving it removes later: it serves the
    // store, and not all ranks have counted themselves.
    std::vector<std::shared_ptr<MonitoredGroup>> to_remove;
    std::deque<FailureEntry> to_publish;
    uint64_t begun = 0;        // rounds
    uint64_t done = 0;         // the last that came to its end
    std::string trouble;       // in the last round; empty: none
    bool was_removed = false;  // the trouble is no rank's end: the store was a file
    bool closed = false;       // the server has left, and this process asks no more
    Clock::time_point answered = Clock::now();  // when it was last known to be well
  };
  // A store's answer about a rank.
  struct Answer {
    std::shared_ptr<MonitoredGroup> group;
    int rank;
    bool has_ended;  // before the question
    bool has_left;
  };

  void look_at_processes();
  void mark_ended(const std::string& process);
  std::string listen(std::unique_lock<std::mutex>& lock);
  void start();
  void wake();
  void run();
  void wait(const NodeLinks& links);
  void link(NodeLinks& links);
  void drop_unused_listener();
  void read_mail();
  void apply_second_claim(const std::string& key, const std::string& why);
  void measure_silence(const NodeLinks& links);
  void publish_death(const MonitoredGroup& group, int rank);
  void publish(const MonitoredGroup& group, FailureEntry entry);
  void open_store(const MonitoredGroup& group);

  // These are in store_round.cpp. tend() does a round; the next round repeats a step that failed.
  void tend(JobStore& store);
  std::vector<Answer> ask_who_left(const JobStore& store);
  void publish_leaving(JobStore& store);
  void heed_closing(JobStore& store);
  bool asks_no_more(const JobStore& store) const;
  bool is_last(const JobStore& store, const MonitoredGroup& group) const;
  void count(MonitoredGroup& group);
  bool all_counted(const MonitoredGroup& group);
  static void remove_left(const MonitoredGroup& group);
  void decide_unanswered(const JobStore& store, Clock::time_point ended_before,
                         const std::vector<Answer>& answers);
  void decide(MonitoredGroup& group, int rank, bool has_left);
  std::vector<std::shared_ptr<MonitoredGroup>> groups_of(const JobStore& store) const;
  void apply(const FailureEntry& entry);

  std::mutex mutex_;  // guards all below, MonitoredGroup and JobStore
  std::condition_variable changed_;
  std::set<std::shared_ptr<MonitoredGroup>> groups_;
  std::map<std::string, WatchedProcess> processes_;  // of these groups
  std::set<std::string> ended_;                      // processes
  std::set<std::string> published_;                  // of these, in the log
  std::set<std::string> linked_;                     // processes
  std::map<std::string, WantedLink> wanted_links_;
  std::set<std::string> greeted_;      // of these, who know this process
  std::set<std::string> unreachable_;  // processes that wanted_links_ has given up
  std::map<KeyValue*, std::shared_ptr<JobStore>> stores_;
  std::unique_ptr<NodeLinks> links_;     // the thread's alone, once that runs
  std::optional<ClaimMailbox> mailbox_;  // open from the first group on
  // Groups that another process came as a rank of, by their keys: how. This may be heard before the
  // group has been made.
  std::map<std::string, std::string> claimed_twice_;
  std::string where_;            // they are taken; empty: nowhere
  bool wants_listener_ = false;  // the thread is to listen
  bool stopping_ = false;
  Descriptor wake_;  // an eventfd
  std::unique_ptr<BackgroundThread> thread_;
};

}  // namespace hbm::failure
