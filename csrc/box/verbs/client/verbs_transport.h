// The client's link over RDMA: keeps a Wire from forked children.
//
// Threads: as Link. In a forked child nothing may be called but the destructor, which leaves the
// queue pairs to the parent.
#pragma once

#include <memory>

#include "base/fork.h"
#include "box/transport/transport.h"
#include "box/verbs/client/wire.h"

namespace hbm::verbs {

class VerbsTransport final : public transport::Transport {
 public:
  explicit VerbsTransport(std::unique_ptr<Wire> wire);
  ~VerbsTransport() override;

  smb::TransportKind transport() const noexcept override { return smb::TransportKind::kVerbs; }
  void post(transport::TransportRequest& work) override;
  void progress(std::chrono::nanoseconds most) override;
  void wake() noexcept override;
  bool alive() const noexcept override;
  int liveness_fd() const noexcept override { return wire_->liveness_fd(); }
  std::shared_ptr<void> adopt(std::byte* memory, uint64_t bytes) override;

 private:
  void require_owner() const;

  const ForkGuard fork_;
  std::unique_ptr<Wire> wire_;
};

// As transport::open_tcp; see library.h.
transport::OpenedTransport open_link(const transport::TransportOptions& opening);

// See library.h.
std::string why_not_here(const std::string& host, uint16_t port);

}  // namespace hbm::verbs
