// The sessions of a box: who may join, and whose lease is over.
//
// A session ends when its client has sent no frame for a lease, or asks for it: by the handler that
// has it, behind the requests that were there first. Until that is done it is still among all(),
// and join() refuses it.
//
// Threads: every member may be called from any thread. Lock order: Sessions, Session, MessageRing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"
#include "box/server/session.h"
#include "box/server/storage/records.h"

namespace hbm::box {

class Sessions {
 public:
  struct Options {
    std::chrono::milliseconds lease{30'000};
    size_t most = 4096;
    // The lease of a session is over: ends it. Called with the lock held, by the timer's thread;
    // when it throws, it is called again a lease later.
    std::function<void(const std::shared_ptr<Session>&)> expired;
    // The clients of a box that was restarted have had the time to come back. Called once, by the
    // timer's thread.
    std::function<void()> settled;
  };

  // Sessions that are in `records` already, be there more than `most`, may come back within a lease
  // from now.
  Sessions(Options options, Records& records);
  ~Sessions();
  Sessions(const Sessions&) = delete;
  Sessions& operator=(const Sessions&) = delete;

  Joining join(const smb::Join& join, smb::TransportKind transport);

  // The handler that had it has ended it: it is unknown from here on.
  void forget(const Session& session);

  std::vector<std::shared_ptr<Session>> all() const;
  std::chrono::milliseconds lease() const noexcept { return options_.lease; }

 private:
  struct Absent {  // known from before the restart, and not back yet
    SessionRecord* record;
    std::shared_ptr<const void> counted;
  };

  std::shared_ptr<const void> count_client();  // until the pointer goes
  std::shared_ptr<Session> begin(const smb::Join& join, smb::TransportKind transport);
  std::shared_ptr<Session> resume(const smb::Join& join, smb::TransportKind transport);
  void watch();
  Clock::time_point expire();  // returns when to look again

  const Options options_;
  Records& records_;
  const std::shared_ptr<std::atomic<size_t>> client_count_;
  const Clock::time_point start_ = Clock::now();

  mutable std::mutex mutex_;  // guards all below
  std::map<smb::Id, std::shared_ptr<Session>> sessions_;
  std::map<smb::Id, Absent> absent_;
  bool settled_ = false;
  bool closing_ = false;
  std::condition_variable closes_;
  std::thread watch_;
};

}  // namespace hbm::box
