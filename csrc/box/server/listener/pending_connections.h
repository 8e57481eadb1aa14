// The clients that are connected and have not joined yet: so many, for so long.
//
// Threads: every member may be called from any thread. A Guest is dismissed with no lock held.
#pragma once

#include <chrono>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace hbm::box {

class PendingConnections {
 public:
  class Guest {
   public:
    virtual ~Guest() = default;

    // Must go. Called at most once, by any thread.
    virtual void dismiss(const char* cause) noexcept = 0;
  };

  PendingConnections(size_t most, std::chrono::milliseconds longest)
      : most_(most), longest_(longest) {}

  // When there are too many, the one that has been here longest is dismissed.
  void enter(const std::shared_ptr<Guest>& guest);

  // It has joined or is gone. It may have been dismissed before.
  void leave(const Guest& guest);

  // Makes room, when there is none for descriptors. False: nobody is here.
  bool dismiss_oldest(const char* cause);

  // Dismisses those who have been here too long. Returns the milliseconds until the next will have
  // been; negative: nobody is here.
  int sweep();

 private:
  using Clock = std::chrono::steady_clock;

  struct Waiting {
    const Guest* key;
    std::weak_ptr<Guest> guest;
    Clock::time_point until;
  };

  std::shared_ptr<Guest> take_oldest();  // with the lock

  const size_t most_;
  const std::chrono::milliseconds longest_;
  std::mutex mutex_;            // guards all below
  std::list<Waiting> waiting_;  // the oldest first
  std::unordered_map<const Guest*, std::list<Waiting>::iterator> places_;
};

}  // namespace hbm::box
