// Accepts connections at one address, and spreads them over the event loops.
//
// When the process has no descriptor left, it waits a moment before it tries again, and sends away
// the client that has been longest without joining.
//
// Threads: serve(), gone() and resume() are called by the thread of the loop that it was added to.
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

namespace hbm::box {

class StreamAcceptor final : public EventLoop::Served {
 public:
  using Loops = std::vector<std::unique_ptr<EventLoop>>;

  // Listens. `users` may come in by a Unix socket. Throws Error(kUnavailable) with the cause.
  // REQUIRES: `context` and `loops`, of which the first serves it, outlive gone().
  StreamAcceptor(StreamContext& context, const Loops& loops, const smb::Address& address,
                 std::vector<uid_t> users);
  ~StreamAcceptor() override;

  const smb::Address& address() const noexcept { return address_; }  // with its port
  int fd() const noexcept { return socket_.get(); }

  EventLoop::Next serve(uint32_t events) noexcept override;
  void gone() noexcept override {}

  // Goes on after a shortage, if it is time. Returns in how many milliseconds to call it again;
  // negative: there is no shortage.
  int resume() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void let_in(Descriptor client);
  bool welcome(int client) const;  // by its user
  void pause(int failure);

  StreamContext& context_;
  const Loops& loops_;
  const std::vector<uid_t> users_;
  smb::Address address_;
  const Descriptor socket_;
  size_t next_ = 0;  // of the loops
  bool paused_ = false;
  Clock::time_point until_{};
  LogLimiter shortages_{1, kShortageWarningPeriod};
};

}  // namespace hbm::box
