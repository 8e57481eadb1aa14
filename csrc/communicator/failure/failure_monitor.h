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
// NewsStore (news_store.h) tells and asks through a store: the news, and who has left.
//
// Threads: every member may be called from any thread. mutex_ is never held while the store is
// asked, which NewsStore::tend() alone does, in the thread; the links are the thread's alone.
#pragma once

#include <chrono>
#include <condition_variable>
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
#include "communicator/failure/mailbox.h"
#include "communicator/failure/monitored_group.h"
#include "communicator/failure/news_store.h"
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
std::string news_key(const std::string& first, const std::string& prefix, const std::string& name);

// How errors tell of a machine that is silent.
std::string silence_text(const std::string& rank, std::chrono::milliseconds silence);

class FailureMonitor : private NewsStore::Owner {
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

  // Starts the thread, for second claims. Throws std::system_error if there is none left.
  void await_claims();

  // The group has been made, under `prefix` of keys. From now on it hears of a second process that
  // comes as one of its ranks.
  void heed_claims(MonitoredGroup& group, const std::string& prefix);

  // Tells a group, which this process is none of, that it has come as one of its ranks.
  void tell_claimed_twice(const MonitoredGroup& own, const std::string& key,
                          const std::vector<std::string>& mailboxes, const std::string& why,
                          std::chrono::milliseconds patience);

  // Returns how another process came as a rank of the group; empty: none is known to.
  std::string claimed_twice(const MonitoredGroup& group);

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
  void read_mail();
  void apply_second_claim(const std::string& key, const std::string& why);
  void measure_silence(const NodeLinks& links);
  void decide(MonitoredGroup& group, int rank, bool has_left) override;
  void tell_death(const MonitoredGroup& group, size_t rank);
  void tell(const MonitoredGroup& group, News entry);
  void open_store(const MonitoredGroup& group);
  std::vector<std::shared_ptr<MonitoredGroup>> groups_of(const KeyValue* keys) const override;
  void has_left(MonitoredGroup& group) override;
  void apply(const News& entry) override;

  std::mutex mutex_;  // guards all below, MonitoredGroup and NewsStore
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
