// The functions of libhbm_verbs.so for clients: the `verbs` transport
// (box/verbs/common/load_library.h).
//
// Threads: any.
#pragma once

#include <cstdint>
#include <string>

#include "box/transport/transport.h"

namespace hbm::box::verbs::client {

struct ClientLibrary {
  static constexpr const char* kEntry = "hbm_verbs_client";

  uint32_t abi;

  // Returns the reason if this host cannot reach `host` over RDMA, else an empty string.
  std::string (*why_not)(const std::string& host, uint16_t port);

  // Opens a transport, as transport::open_tcp(). `opening` has the TCP port of the box. A TCP
  // connection proves the token, and stays open to detect the end of the box. Throws the errors of
  // open_tcp(), and Error(kUnavailable) if either end has no RDMA device.
  transport::OpenedTransport (*open)(const transport::TransportOptions& opening);
};

}  // namespace hbm::box::verbs::client
