// Accepts connections at one address, and distributes them over the event loops.
//
// When descriptors run out, the acceptor pauses, and dismisses the client that has been connected
// longest without joining.
//
// Threads: the thread of the first loop calls serve(), gone() and resume().
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "box/protocol/address.h"
#include "box/server/listener/admission.h"
#include "box/server/listener/event_loop.h"
#include "box/server/listener/stream_connection.h"
#include "box/server/tuning.h"

namespace hbm::box::server::listener {

class StreamAcceptor final : public EventLoop::Served {
 public:
  using Loops = std::vector<std::unique_ptr<EventLoop>>;

  // Listens. `users`: the users that a Unix socket admits, besides root. Throws Error(kUnavailable)
  // with the cause. REQUIRES: `context` and `loops` outlive gone(); the first loop serves this
  // object.
  StreamAcceptor(StreamContext& context, const Loops& loops, const protocol::Address& address,
                 std::vector<uid_t> users);
  ~StreamAcceptor() override;

  const protocol::Address& address() const noexcept { return address_; }  // with the chosen port
  int fd() const noexcept { return socket_.get(); }

  EventLoop::Next serve(uint32_t events) noexcept override;
  void gone() noexcept override {}

  // Resumes accepting when the pause is over. Returns the milliseconds until the next call;
  // negative: not paused.
  int resume() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void accept(Descriptor client);
  bool admits(int client) const;  // checks the user of the client
  void pause(int failure);

  StreamContext& context_;
  const Loops& loops_;
  const std::vector<uid_t> users_;
  protocol::Address address_;
  const Descriptor socket_;
  size_t next_ = 0;  // number of accepted clients: chooses the next one's loop
  bool paused_ = false;
  Clock::time_point until_{};
  LogLimiter shortages_{1, kShortageWarningPeriod};
};

}  // namespace hbm::box::server::listener
