// The options of a box.
//
// Threads: any.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "box/protocol/address.h"
#include "memory/policy.h"

namespace hbm::box {

enum class VerbsChoice { kOff, kAuto, kOn };  // kAuto: on if there is a usable RDMA device

// Throws Error(kInvalid), naming the three choices, if `name` is not off, auto or on.
VerbsChoice parse_verbs(const std::string& name);

struct ServerOptions {
  // TCP addresses, "host:port". Port 0: a free one of chosen_ports(). An empty list: no TCP.
  std::vector<std::string> listen{"127.0.0.1:0"};
  bool unix_socket = true;  // required by shm
  std::string socket_path;  // of the Unix socket; empty: new_socket_path()

  uint64_t memory = 0;  // bytes, over all segments
  memory::Policy policy = memory::Policy::kPreferred;
  uint64_t smallest_block = uint64_t{4} << 10;  // bytes, powers of two
  uint64_t largest_block = uint64_t{32} << 30;

  std::string store;  // directory in which segments survive the process; empty: none
  bool sync = false;  // survive a crash of the host too (box/server/storage/store.h)

  std::string token;  // clients must prove it; empty: any client may use the box
  // With a token: authenticate all frames on tcp after the join, and control messages on verbs.
  // Must agree with the option of the clients.
  bool seal = true;
  std::chrono::milliseconds lease{30'000};
  uint32_t most_clients = 4096;

  // Threads; 0: chosen by the number of processors (box/server/tuning.h).
  uint32_t handlers = 0;            // execute requests
  uint32_t accumulate_threads = 0;  // share a large accumulate
  uint32_t receivers = 0;           // run the event loops of the sockets

  VerbsChoice verbs = VerbsChoice::kAuto;
  std::string verbs_host;   // the address of an RDMA device's interface; empty: the first device
  uint16_t verbs_port = 0;  // 0: any
};

// Checks the options. Returns the addresses of options.listen. Throws Error(kInvalid) or
// Error(kUnsupported), with the remedy, for invalid options. The pool checks its own options
// (memory/pool.h).
std::vector<protocol::Address> check(const ServerOptions& options);

// Returns a path for the Unix socket of a box whose options have none: an unpredictable name in
// socket_directory(). Also removes the sockets that killed boxes left in this directory.
std::string new_socket_path();

}  // namespace hbm::box
