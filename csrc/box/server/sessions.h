// The sessions of a box: admits clients, and ends sessions whose lease is over.
//
// A session ends when its client leaves, or has sent no frame for the duration of the lease. To end
// a session, a kLeave is queued behind its other requests, and the handler that has the session
// executes the kLeave. Until then all() includes the session, but join() refuses it once the kLeave
// is queued.
//
// Threads: any. Lock order: Sessions, then one of Session, RunQueue and the lock of the records.
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

namespace hbm::box::server {

class Sessions {
 public:
  struct Options {
    std::chrono::milliseconds lease{30'000};
    size_t most = 4096;
    // Ends a session whose lease is over. Called by the timer thread with the lock held; called
    // again one lease later if it throws.
    std::function<void(const std::shared_ptr<Session>&)> expired;
    // Called once, by the timer thread, two leases after the start. By then, the clients of the box
    // that served the store before have had time to reconnect.
    std::function<void()> settled;
  };

  // Sessions in `records` may be resumed within one lease from now, even if they are more than
  // `most`.
  Sessions(Options options, storage::Records& records);
  ~Sessions();
  Sessions(const Sessions&) = delete;
  Sessions& operator=(const Sessions&) = delete;

  Joining join(const protocol::Join& join, protocol::TransportKind transport,
               const std::string& host);

  // Forgets a session that its handler has ended, and frees its record.
  void forget(const Session& session);

  std::vector<std::shared_ptr<Session>> all() const;
  std::chrono::milliseconds lease() const noexcept { return options_.lease; }

 private:
  struct Absent {  // from before the restart, not yet resumed
    storage::SessionRecord* record;
    std::shared_ptr<const void> counted;
  };

  std::shared_ptr<const void> count_client();  // counts a client until the pointer is destroyed
  std::shared_ptr<Session> begin(const protocol::Join& join, protocol::TransportKind transport);
  std::shared_ptr<Session> resume(const protocol::Join& join, protocol::TransportKind transport);
  void watch();
  Clock::time_point expire();  // returns the time of the next check

  const Options options_;
  storage::Records& records_;
  const std::shared_ptr<std::atomic<size_t>> client_count_;
  const Clock::time_point start_ = Clock::now();

  mutable std::mutex mutex_;  // guards all below
  std::map<protocol::Id, std::shared_ptr<Session>> sessions_;
  std::map<protocol::Id, Absent> absent_;
  bool settled_ = false;
  bool closing_ = false;
  std::condition_variable closes_;
  std::thread watch_;
};

}  // namespace hbm::box::server
