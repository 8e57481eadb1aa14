// What the shared object libhbm_verbs.so gives its users: the `verbs` transport, both ends.
//
// It alone links libibverbs and librdmacm, so that a machine without them can run all the rest.
// load.h opens it. Both sides are of one build, which the number kAbi guards: it rises whenever one
// of the types that cross the border changes.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "box/server/request_handler.h"
#include "box/transport/transport.h"

namespace hbm::verbs {

inline constexpr uint32_t kAbi = 1;

struct VerbsListenerOptions {
  std::string host;   // the address of an RDMA device's network interface; empty: the first device
  uint16_t port = 0;  // of the RDMA connection manager, not of TCP; 0: any
  std::string token;  // empty: none is asked for
  uint32_t max_clients = 4096;
  uint32_t max_lanes = 16;   // queue pairs of one client
  bool windows = true;       // memory windows, where the device has them (box_memory.h)
  uint32_t messages = 4096;  // receive buffers for the requests of all clients together, 512 B each
};

struct OpenListener {
  std::unique_ptr<box::Listener> door;
  uint16_t port = 0;
};

struct Library {
  uint32_t abi;

  // Why this host cannot use RDMA towards `host`, in words; empty: it can. An empty host asks for
  // a device alone, as a box does.
  std::string (*why_not)(const std::string& host, uint16_t port);

  // As transport::open_tcp: `opening` names the box's TCP port, which proves the token and stays
  // connected as the sign of life.
  // Throws as open_tcp, and Error(kUnavailable) when either end has no RDMA device.
  transport::OpenedTransport (*open)(const transport::TransportOptions& opening);

  // Registers the memory of every segment of `handler`, and lets clients in.
  // Throws Error(kUnavailable) when there is no RDMA device, Error(kInvalid) when `host` is not the
  // address of one, Error(kExhausted) when the memory cannot be registered.
  OpenListener (*listen)(box::RequestHandler& handler, const VerbsListenerOptions& options);
};

inline constexpr const char* kEntry = "hbm_verbs_library";
using Entry = const Library* (*)();

}  // namespace hbm::verbs
