// Keeps a client connected to its box: connects, progresses operations for which no thread waits,
// sends pings, and replaces a broken connection.
//
// Threads: the constructor connects, in the thread of its caller. From then until stop(), a thread
// of the reconnector does everything else, and owns every member. This thread takes the hold on the
// engine and the lock of the table, and holds the engine while it reconnects.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "box/client/dialer.h"
#include "box/client/options.h"
#include "box/client/progress_engine.h"
#include "box/client/request_table.h"
#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::box::client {

class Reconnector {
 public:
  // Connects. REQUIRES: all arguments outlive this object. Throws the errors of Dialer::dial().
  Reconnector(const ClientOptions& options, Dialer& dialer, RequestTable& table,
              ProgressEngine& engine);
  Reconnector(const Reconnector&) = delete;
  Reconnector& operator=(const Reconnector&) = delete;

  // Ends the thread. REQUIRES: RequestTable::stop() was called.
  void stop();

 private:
  struct Renewal;  // an attachment to be restored

  void run();
  bool turn();  // false: stop
  void sleep(Clock::time_point until);
  bool pause(Clock::duration delay);  // false: stop

  // reconnect() takes the hold on the engine. The functions after it REQUIRE the hold.
  void reconnect();
  bool try_again(std::chrono::milliseconds timeout);
  void attach_again(transport::Transport& transport, uint64_t applied,
                    std::vector<Renewal>& renewals);
  void resume(transport::OpenedTransport& opened, std::vector<Renewal>& renewals,
              bool same_session);

  const ClientOptions& options_;
  Dialer& dialer_;
  RequestTable& table_;
  ProgressEngine& engine_;
  protocol::Id session_;
  protocol::Id generation_;  // store generation of the box
  std::thread thread_;
};

}  // namespace hbm::box::client
