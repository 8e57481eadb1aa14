// The functions of libhbm_verbs.so for clients: the `verbs` transport. See
// box/verbs/common/load_library.h.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

#include "box/transport/transport.h"

namespace hbm::verbs {

struct ClientLibrary {
  static constexpr const char* kEntry = "hbm_verbs_client";

  uint32_t abi;

  // Why this host cannot use RDMA towards `host`, in words; empty: it can.
  std::string (*why_not)(const std::string& host, uint16_t port);

  // Opens a transport as transport::open_tcp() does: `opening` names the box's TCP port, which
  // proves the token and stays connected as the sign of life. Throws as open_tcp(), and
  // Error(kUnavailable) when either end has no RDMA device.
  transport::OpenedTransport (*open)(const transport::TransportOptions& opening);
};

}  // namespace hbm::verbs
