// Connects to a box, and takes leave of it: chooses the transport once, by proof, and uses it again
// after a break.
//
// Threads: dial() and dial_again() by one at a time; the rest from any thread once dial() returned.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "box/client/options.h"
#include "box/protocol/address.h"
#include "box/transport/transport.h"

namespace hbm::client {

class Dialer {
 public:
  // Throws Error(kInvalid) for a URL or a combination that makes no sense.
  explicit Dialer(const ClientOptions& options);

  // Throws BoxError kDenied or kUnreachable, with the reason for each transport that was tried.
  transport::OpenedTransport dial();

  // Opens a connection by the transport that dial() chose. It resumes `session`, or begins a new
  // one if that is none. Throws what transport::open_* throw.
  transport::OpenedTransport dial_again(smb::Id session, std::chrono::milliseconds timeout);

  smb::TransportKind transport() const noexcept { return transport_; }
  std::string why() const { return why_; }
  std::string box() const { return address_.url(); }

 private:
  transport::TransportOptions opening(smb::Id session, std::chrono::milliseconds timeout) const;
  transport::OpenedTransport choose();
  transport::OpenedTransport open_by(smb::TransportKind transport,
                                     const transport::TransportOptions& opening);

  const TransportChoice choice_;
  const transport::TransportOptions template_;
  const smb::Address address_;
  const bool read_only_;
  smb::TransportKind transport_ = smb::TransportKind::kTcp;
  std::string why_;
};

// Ends the session, with its attachments, and the transport. A box that does not answer within a
// second, or cannot be reached, ends the session when its lease is over.
void leave(std::unique_ptr<transport::Transport> transport, const std::string& box);

}  // namespace hbm::client
