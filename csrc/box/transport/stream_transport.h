// A Transport over stream sockets: tcp's lanes, or the one Unix socket of shm.
//
// Threads: as Transport. In a forked child it stays its parent's: alive() is false, post() and
// progress() throw Error(kUnavailable), and the destructor leaves the connection as it is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "box/transport/lanes.h"
#include "box/transport/transport.h"

namespace hbm::transport {

class StreamTransport final : public Transport {
 public:
  StreamTransport(smb::TransportKind transport, std::unique_ptr<Lanes> lanes);
  ~StreamTransport() override;
  StreamTransport(const StreamTransport&) = delete;
  StreamTransport& operator=(const StreamTransport&) = delete;

  smb::TransportKind transport() const noexcept override { return transport_; }
  void post(TransportRequest& work) override;
  void progress(std::chrono::nanoseconds most) override;
  void wake() noexcept override;
  bool alive() const noexcept override;
  int liveness_fd() const noexcept override { return lanes_->first_socket(); }

 private:
  void require_owner() const;

  const ForkGuard fork_;
  const smb::TransportKind transport_;
  std::unique_ptr<Lanes> lanes_;
};

}  // namespace hbm::transport
