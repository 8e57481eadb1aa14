// Watches the processes of all groups of this process. Only the monitor decides that a rank on
// another node has died, and only by proof. (Ranks that share memory also watch one another:
// shm::ShmGroup::require_alive().) docs/failures.md has the states of a rank.
//
// A pidfd shows the end of a process of this node (the same kernel, PID namespace and
// HBMCOMM_NODE_ID). From the first group of several ranks on, the monitor has a thread. The thread
// receives reports of second claims: another process has come as one of a group's ranks. For groups
// of several nodes, the thread also detects the ends of processes on other nodes by
// LivenessConnections. For these groups, and for groups without shared memory, it exchanges entries
// of the failure log through the store at least four times a second. It does so immediately when a
// connection or a process ends, or when an entry is to be published. So a process reports a death
// even while its rank computes. If the store does not answer, a caller waits for at most the
// `timeout` of the call.
//
// Threads: any thread may call every member. mutex_ is never held during a request to the store.
// Only tend() makes such requests, in the monitor's thread (store_round.cpp). Once this thread has
// started, only it uses the connections.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
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
#include "communicator/failure/liveness_connections.h"
#include "communicator/failure/mailbox.h"
#include "communicator/failure/monitored_group.h"
#include "communicator/failure/tuning.h"

namespace hbm::communicator::failure {

// The monitor's knowledge of a group's other ranks, for an operation that waits for some of them.
struct Findings {
  std::optional<std::string> failure;
  std::set<int> dead;
  std::set<int> left;
  std::map<int, std::chrono::milliseconds> silent;
  std::string store_trouble;  // the store's error, if it has lasted for over a second; else empty
};

// Returns the name of a group in the failure log. No other group has this name. `first`: the
// bootstrap::process_id() of its rank 0. `prefix`: of the group's keys. `name`: the group's name.
std::string log_key(const std::string& first, const std::string& prefix, const std::string& name);

// Returns the text of errors about a silent machine.
std::string silence_text(const std::string& rank, std::chrono::milliseconds silence);

class FailureMonitor {
 public:
  // The monitor of this process.
  static FailureMonitor& here();

  // Adds a group in the state kMeeting. Each call below throws std::logic_error if the group is in
  // a state in which the call is not legal (monitored_group.h).
  void add(const std::shared_ptr<MonitoredGroup>& group);

  // Stops watching the group. Idempotent, and legal in every state.
  void remove(const std::shared_ptr<MonitoredGroup>& group);

  // Declares that rank `rank` of the group is `member`. Called first for this process itself, then
  // for each other rank.
  void meet(MonitoredGroup& group, int rank, const bootstrap::Member& member);

  // Starts the thread, so that it receives reports of second claims. On rank 0 of the group, also
  // starts to listen for liveness connections, unless this process listens already, and returns the
  // address. Throws std::system_error if no thread can start.
  std::string prepare(MonitoredGroup& group);

  // Declares that all ranks have met. Closes the listener for liveness connections unless this
  // group or another needs it.
  void all_met(MonitoredGroup& group);

  // Returns the names of the ranks in `ranks` whose process is known to have ended. Called while
  // the group is being formed. If a rank has not come yet, its process is found through another
  // group with the same job_store that has the same global rank.
  std::vector<std::string> ended(const MonitoredGroup& group, const std::vector<int>& ranks);

  // Returns the names of all ended processes, of all groups that have not been removed.
  std::vector<std::string> ended();

  // Waits until this process has published all its entries and has read the failure log, or
  // `timeout` is over.
  void await_published(const MonitoredGroup& group, std::chrono::milliseconds timeout);

  // Waits until the group's rank 0, if that is on another node, would detect the end of this
  // process. Also returns if this process cannot connect to rank 0, if rank 0 has ended, or at the
  // deadline.
  void await_greeting(const MonitoredGroup& group, bootstrap::KeyValue::Deadline deadline);

  // Waits until this process has its liveness connection to the group's rank 0, if rank 0 is on
  // another node. Returns also if the connection cannot be made, and then the monitor logs one
  // warning.
  void await_connections(const MonitoredGroup& group, bootstrap::KeyValue::Deadline deadline);

  // Declares that the group is formed, under the key prefix `prefix`. From this call on, the
  // monitor sets `claimed_twice` of the group when another process comes as one of its ranks. If
  // `is_monitored`, the monitor also does rounds at the group's store, for deaths and failures.
  // The monitor calls `wake_sleepers` after a process of the group has ended, until remove().
  // `wake_sleepers` must not wait, because the monitor's mutex is held.
  void formed(MonitoredGroup& group, const std::string& prefix, bool is_monitored,
              std::function<void()> wake_sleepers);

  // Reports a second claim to the processes of a group: this process has come as one of that
  // group's ranks. `key`: the log_key() of that group. `mailboxes`: the mailboxes of that group's
  // ranks. The report goes to these mailboxes, and to the failure log in the job_store of `own`,
  // the group that this process tried to form. `why`: the text of the report.
  void tell_claimed_twice(const MonitoredGroup& own, const std::string& key,
                          const std::vector<std::string>& mailboxes, const std::string& why,
                          std::chrono::milliseconds timeout);

  // Declares that the process of rank `rank` has ended: a rank of this node has found it dead.
  void note_end(const MonitoredGroup& group, int rank);

  // Returns the state of the group. `missing`: the ranks for which the caller waits; the next round
  // asks the store whether they have left.
  Findings findings(MonitoredGroup& group, const std::vector<int>& missing);

  // Publishes the failure that has broken the group. Waits until the store has the report, or
  // `timeout` is over.
  void report(MonitoredGroup& group, const std::string& failure, std::chrono::milliseconds timeout);

  // Waits until the store has all entries of this process. Returns false if the store is gone, or
  // did not get them in time.
  bool finish_publishing(const MonitoredGroup& group, std::chrono::milliseconds timeout);

  // Publishes that this process leaves the group, and waits until the store has this. Returns false
  // if the store is gone, or `timeout` is over. Throws the exception of Ctrl-C on the main thread.
  bool leave(MonitoredGroup& group, std::chrono::milliseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;

  struct WatchedProcess {
    std::string name;  // "rank 3 (pid 4711 on host) of group "0""
    Descriptor pidfd;  // none: on another node, or unavailable
  };
  // A process to which this process must connect.
  struct WantedConnection {
    std::string where;  // address of its listener
    bool near;          // in the same network namespace as this process
    Clock::time_point until;
  };
  // One store: its failure log, and the state of its rounds. Guarded by mutex_, except `log`,
  // `answer_time` and `to_remove`, which only the thread uses.
  struct JobStore {
    explicit JobStore(const std::shared_ptr<bootstrap::KeyValue>& store)
        : keys(store.get()), log(store) {}
    const bootstrap::KeyValue* const keys;
    FailureLog log;
    std::chrono::milliseconds answer_time = kRoundAnswerTimeout;  // for each question of a round
    // Groups that this process has left, if it serves their store. Their keys below `left_prefix`
    // are removed later, when all ranks have counted themselves (store_round.cpp).
    std::vector<std::shared_ptr<MonitoredGroup>> to_remove;
    std::deque<FailureEntry> to_publish;
    uint64_t begun = 0;        // the number of the last round that has begun
    uint64_t done = 0;         // the number of the last round that was complete
    std::string trouble;       // the error of the last round; empty: none
    bool was_removed = false;  // the store was a file, now removed; the other ranks may live
    bool closed = false;  // the rank that serves the store leaves, so this process asks no more
    Clock::time_point answered = Clock::now();  // the time of the last answer
    // No question is asked before this time, because the last one failed. Each failed question
    // doubles the pause.
    Clock::time_point asks_again;
    std::chrono::milliseconds pause{0};
  };
  // A store's answer about a rank.
  struct Answer {
    std::shared_ptr<MonitoredGroup> group;
    int rank;
    bool has_ended;  // the rank's process had ended before the question
    bool has_left;
  };

  void check_processes();
  void mark_ended(const std::string& process);
  std::string listen(std::unique_lock<std::mutex>& lock);
  void start();
  void wake();
  void run();
  void wait(const LivenessConnections& connections);
  void connect(LivenessConnections& connections);
  void drop_unused_listener();
  void read_mail();
  void apply_second_claim(const std::string& key, const std::string& why);
  void measure_silence(const LivenessConnections& connections);
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
  void count(const JobStore& store, MonitoredGroup& group);
  bool all_counted(const JobStore& store, const MonitoredGroup& group);
  static void remove_left(const MonitoredGroup& group);
  void decide_unanswered(const JobStore& store, Clock::time_point ended_before,
                         const std::vector<Answer>& answers);
  void decide(MonitoredGroup& group, int rank, bool has_left);
  std::vector<std::shared_ptr<MonitoredGroup>> groups_of(const JobStore& store) const;
  void apply(const FailureEntry& entry);

  // Guards the members below, MonitoredGroup and JobStore, except where a comment says otherwise.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::shared_ptr<MonitoredGroup>> groups_;
  std::map<std::string, WatchedProcess> processes_;  // processes of these groups
  std::set<std::string> ended_;                      // processes that have ended
  std::set<std::string> published_;                  // ended processes that are in the log
  std::set<std::string> connected_;                  // processes that this one has connected to
  std::map<std::string, WantedConnection> wanted_connections_;
  std::set<std::string> greeted_;      // processes to which this one has identified itself
  std::set<std::string> unreachable_;  // processes to which this process could not connect
  std::map<bootstrap::KeyValue*, std::shared_ptr<JobStore>> stores_;
  // Used only by the thread after it has started.
  std::unique_ptr<LivenessConnections> connections_;
  std::optional<ClaimMailbox> mailbox_;  // open from the first group on
  // Maps the key of a group to the text of the report that one of its ranks was claimed twice. The
  // group may not be formed yet.
  std::map<std::string, std::string> claimed_twice_;
  std::string where_;            // address of the listener; empty: not listening
  std::string listen_failure_;   // why the last attempt to listen failed
  bool wants_listener_ = false;  // the thread must start to listen
  bool stopping_ = false;
  std::chrono::steady_clock::time_point reports_until_;  // until then rounds are frequent
  Descriptor wake_;                                      // an eventfd
  std::unique_ptr<BackgroundThread> thread_;
};

}  // namespace hbm::communicator::failure
