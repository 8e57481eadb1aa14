// The functions of libhbm_verbs.so for servers: a listener for clients that come over RDMA. See
// box/verbs/common/load_library.h.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "box/server/request_handler.h"

namespace hbm::verbs {

struct VerbsListenerOptions {
  std::string host;   // the address of an RDMA device's network interface; empty: the first device
  uint16_t port = 0;  // of the RDMA connection manager, not of TCP; 0: any
  std::string token;  // empty: none is asked for
  bool seal = true;   // with a token: control messages, see box/protocol/seal.h
  uint32_t max_clients = 4096;
  uint32_t max_lanes = 16;   // queue pairs of one client
  bool windows = true;       // memory windows, where the device has them (box_memory.h)
  uint32_t messages = 4096;  // receive buffers for the requests of all clients together, 512 B each
};

struct OpenedListener {
  std::unique_ptr<box::Listener> listener;
  uint16_t port = 0;
};

struct ServerLibrary {
  static constexpr const char* kEntry = "hbm_verbs_server";

  uint32_t abi;

  // Why this host cannot let clients in over RDMA, in words; empty: it can.
  std::string (*why_not)();

  // Registers the memory of every segment of `handler`, and lets clients in.
  // Throws Error(kUnavailable) when there is no RDMA device, Error(kInvalid) when `host` is not the
  // address of one, Error(kExhausted) when the memory cannot be registered.
  OpenedListener (*listen)(box::RequestHandler& handler, const VerbsListenerOptions& options);
};

}  // namespace hbm::verbs
