// Keeps a client connected to its box: connects, drives operations that no other thread drives,
// pings included, and makes another connection for one that broke.
//
// Threads: one of its own does all of this, from the constructor to stop(). It owns every member.
// Locks: it takes the driver's hold and the table's lock, and holds the driver while it reconnects.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "box/client/dialer.h"
#include "box/client/driver.h"
#include "box/client/options.h"
#include "box/client/request_table.h"
#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::client {

class Reconnector {
 public:
  // Connects. All that it is given outlives it. Throws as Dialer::dial().
  Reconnector(const ClientOptions& options, Dialer& dialer, RequestTable& table, Driver& driver);
  Reconnector(const Reconnector&) = delete;
  Reconnector& operator=(const Reconnector&) = delete;

  // Ends the thread. REQUIRES: RequestTable::stop() was called.
  void stop();

 private:
  struct Renewal;  // an attachment made again

  void run();
  bool turn();  // false: it is time to stop
  void sleep(Clock::time_point until);
  bool pause(Clock::duration delay);  // false: it is time to stop

  // The driver is held in all of these.
  void reconnect();
  bool try_again(std::chrono::milliseconds timeout);
  void attach_again(transport::Transport& transport, uint64_t applied,
                    std::vector<Renewal>& renewals);
  void resume(transport::OpenedTransport& opened, std::vector<Renewal>& renewals,
              bool same_session);

  const ClientOptions& options_;
  Dialer& dialer_;
  RequestTable& table_;
  Driver& driver_;
  smb::Id session_;
  smb::Id contents_;  // of the box
  std::thread thread_;
};

}  // namespace hbm::client
