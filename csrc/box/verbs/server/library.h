// The functions of libhbm_verbs.so for servers: a listener for clients over RDMA
// (box/verbs/common/load_library.h).
//
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "box/server/request_handler.h"

namespace hbm::box::verbs::server {

struct VerbsListenerOptions {
  std::string host;   // the address of an RDMA device's network interface; empty: the first device
  uint16_t port = 0;  // of the RDMA connection manager, not of TCP; 0: any
  std::string token;  // empty: no token is required
  bool seal = true;   // with a token: authenticate control messages (box/protocol/authenticator.h)
  uint32_t max_clients = 4096;
  uint32_t max_queue_pairs = 16;  // queue pairs of one client
  bool windows = true;            // memory windows, if the device has them (box_memory.h)
  uint32_t messages = 4096;  // receive buffers for the requests of all clients together, 512 B each
};

struct OpenedListener {
  std::unique_ptr<box::server::Listener> listener;
  uint16_t port = 0;
};

struct ServerLibrary {
  static constexpr const char* kEntry = "hbm_verbs_server";

  uint32_t abi;

  // Returns the reason if this host cannot serve clients over RDMA, else an empty string.
  std::string (*why_not)();

  // Registers the memory of every segment of `handler`, and admits clients. Throws
  // Error(kUnavailable) without an RDMA device, and Error(kInvalid) if no device has the address
  // `host`. Throws Error(kExhausted) or Error(kUnavailable) if the memory cannot be registered.
  OpenedListener (*listen)(box::server::RequestHandler& handler,
                           const VerbsListenerOptions& options);
};

}  // namespace hbm::box::verbs::server
