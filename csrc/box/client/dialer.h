// Connects to a box, and leaves it. Chooses the transport once, by probing, and uses it again after
// a break.
//
// Threads: one at a time may call dial() and dial_again(). Any may call the other members once
// dial() has returned.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "box/client/options.h"
#include "box/protocol/address.h"
#include "box/transport/transport.h"

namespace hbm::box::client {

class Dialer {
 public:
  // Throws Error(kInvalid) for an invalid URL or combination of options.
  explicit Dialer(const ClientOptions& options);

  // Connects. Throws BoxError kUnreachable, with the reason, if no connection was made. If the box
  // refuses the join, throws the failure() of the refusal's status, such as BoxError kDenied.
  // Throws Error(kInvalid) for an invalid number of connections.
  transport::OpenedTransport dial();

  // Connects over the transport that dial() chose. Resumes `session`, or begins a new session if
  // `session` is empty. Throws the errors of open_shm(), open_tcp() and ClientLibrary::open.
  transport::OpenedTransport dial_again(protocol::Id session, std::chrono::milliseconds timeout);

  protocol::TransportKind transport() const noexcept { return transport_; }
  std::string why() const { return why_; }
  std::string box() const { return address_.url(); }

 private:
  transport::TransportOptions opening(protocol::Id session,
                                      std::chrono::milliseconds timeout) const;
  transport::OpenedTransport choose();
  transport::OpenedTransport open_by(protocol::TransportKind transport,
                                     const transport::TransportOptions& opening);

  const TransportChoice choice_;
  const transport::TransportOptions template_;
  const protocol::Address address_;
  const bool read_only_;
  protocol::TransportKind transport_ = protocol::TransportKind::kTcp;
  std::string why_;
};

// Ends the session and its attachments, then destroys the transport. If the box does not reply
// within kLeaveTimeout, the box ends the session when the lease is over.
void leave(std::unique_ptr<transport::Transport> transport, const std::string& box);

}  // namespace hbm::box::client
