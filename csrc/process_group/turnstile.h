// Counts the threads that are in calls of a group, so that the group can be exchanged when none is.
//
// Threads: any thread may call enter(). One thread at a time closes the turnstile.
//
// enter() increments the count and then reads the flag. Closed() sets the flag and then reads the
// count. All four are sequentially consistent. So either enter() sees the flag and refuses the
// call, or Closed() sees the count and waits for the call. The last decrement of the count releases
// the call's writes to Closed(), and the flag's end releases the exchange to the next enter().
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "process_group/tuning.h"

namespace hbm::process_group {

class Turnstile {
 public:
  // A call in progress.
  class Entry {
   public:
    explicit Entry(Turnstile* owner) : owner_(owner) {}
    Entry(Entry&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
    ~Entry() {
      if (owner_ != nullptr) owner_->inside_.fetch_sub(1);
    }

   private:
    Turnstile* owner_;
  };

  // Refuses calls during its lifetime. The constructor waits until no call is in progress.
  class Closed {
   public:
    explicit Closed(Turnstile& owner) : owner_(owner) {
      owner_.closed_.store(true);
      while (owner_.inside_.load() != 0) std::this_thread::sleep_for(kTurnstileCheckPeriod);
    }
    ~Closed() { owner_.closed_.store(false); }
    Closed(const Closed&) = delete;
    Closed& operator=(const Closed&) = delete;

   private:
    Turnstile& owner_;
  };

  // `counts`: false for a group that is never exchanged, whose calls need no count.
  explicit Turnstile(bool counts) : counts_(counts) {}

  // Begins a call of `group`, which lasts for the lifetime of the result. Throws Error(kAborted)
  // while the turnstile is closed.
  Entry enter(const std::string& group) {
    if (!counts_) return Entry(nullptr);
    inside_.fetch_add(1);
    if (closed_.load()) {
      inside_.fetch_sub(1);
      throw Error(ErrorKind::kAborted,
                  group + " is being reconfigured by another thread; wait for its reconfigure()");
    }
    return Entry(this);
  }

 private:
  const bool counts_;
  std::atomic<int> inside_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace hbm::process_group
