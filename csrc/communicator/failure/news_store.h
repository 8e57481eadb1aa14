// All that the failure monitor tells and asks through one store: the news of deaths and failures,
// and who has left its group in good order. It brings what it learns to its owner, which decides.
//
// Closing: a store ends with the process that serves it, and PyTorch's client prints each question
// that fails after that. So the serving rank publishes an entry when it leaves its last group of
// the store. It then waits until the other ranks have counted themselves: each does so when it
// leaves the group, or when it reads the entry. A counted rank asks the store no more.
//
// Keys: once all ranks of a group have counted themselves, the serving rank removes the keys of
// leaving. If no rank serves the store, the rank that counts itself last removes them.
//
// Locks: `mutex` is the owner's, and guards this and the groups. Only tend() asks the store, and
// holds the mutex at no time while it does; it takes it between two questions, so that what is told
// meanwhile waits for the next round. The owner is called with the mutex held.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/key_value.h"
#include "communicator/failure/monitored_group.h"
#include "communicator/failure/news_log.h"

namespace hbm::failure {

class NewsStore {
 public:
  using Clock = std::chrono::steady_clock;

  class Owner {
   public:
    virtual std::vector<std::shared_ptr<MonitoredGroup>> groups_of(const KeyValue* keys) const = 0;
    // Takes in what another process has told.
    virtual void apply(const News& entry) = 0;
    // Takes a rank that somebody waits for, or whose process has ended, for one that has left, or
    // else for dead.
    virtual void decide(MonitoredGroup& group, int rank, bool has_left) = 0;
    // Hears that this process' own leaving of the group has been told.
    virtual void has_left(MonitoredGroup& group) = 0;

   protected:
    ~Owner() = default;
  };

  // `mutex` and `owner` outlive this.
  NewsStore(std::shared_ptr<KeyValue> keys, std::mutex& mutex, Owner& owner)
      : keys_(keys), news_(std::move(keys)), mutex_(mutex), owner_(owner) {}

  // A round: asks who has left, exchanges news, tells who leaves. What fails is done in the next
  // one. From one thread; REQUIRES: the mutex is not held.
  void tend();

  // REQUIRES of all that follow: the mutex is held.
  // A group is being made, so the store is asked again.
  void open() { closed_ = false; }
  void tell(News entry) { to_tell_.push_back(std::move(entry)); }
  bool has_told_all() const { return to_tell_.empty(); }
  // The first round that begins from now on.
  uint64_t next_round() const { return begun_ + 1; }
  // Whether this round, or a later one, has come to its end.
  bool has_done(uint64_t round) const { return done_ >= round; }
  // Says what was wrong with the store in the last round; empty: nothing.
  const std::string& trouble() const { return trouble_; }
  // Returns true if the trouble is no rank's end: the store was a file, and was removed.
  bool was_removed() const { return was_removed_; }
  // When it was last known to be well.
  Clock::time_point answered() const { return answered_; }

 private:
  // An answer of the store's about a rank.
  struct Answer {
    std::shared_ptr<MonitoredGroup> group;
    int rank;
    bool has_ended;  // before the question
    bool has_left;
  };

  std::vector<Answer> ask_who_left();
  void tell_leaving();
  void heed_closing();
  bool asks_no_more() const;
  bool is_last(const MonitoredGroup& group) const;
  void count(MonitoredGroup& group);
  bool all_counted(const MonitoredGroup& group);
  static void remove_left(const MonitoredGroup& group);
  void decide_unanswered(Clock::time_point ended_before, const std::vector<Answer>& answers);

  const std::shared_ptr<KeyValue> keys_;
  NewsLog news_;  // of tend() alone
  std::mutex& mutex_;
  Owner& owner_;
  std::deque<News> to_tell_;
  // Groups that this process has left, and whose keys of leaving it removes later: it serves the
  // store, and not all ranks have counted themselves. Used by tend() alone.
  std::vector<std::shared_ptr<MonitoredGroup>> to_remove_;
  uint64_t begun_ = 0;   // rounds
  uint64_t done_ = 0;    // the last that came to its end
  std::string trouble_;  // empty: none
  bool was_removed_ = false;
  bool closed_ = false;  // the server has left, and this process asks no more
  Clock::time_point answered_ = Clock::now();
};

}  // namespace hbm::failure
