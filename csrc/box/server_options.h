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

enum class VerbsChoice { kOff, kAuto, kOn };  // kAuto: if there is an RDMA device

// Throws Error(kInvalid), naming the three choices, for any name but off, auto and on.
VerbsChoice parse_verbs(const std::string& name);

struct ServerOptions {
  std::vector<std::string> listen{"127.0.0.1:0"};  // TCP, "host:port"; port 0: any; none: no TCP
  bool unix_socket = true;                         // what shm needs
  std::string socket_path;                         // of the Unix socket; empty: chosen

  uint64_t memory = 0;  // bytes, over all segments
  memory::Policy policy = memory::Policy::kPreferred;
  uint64_t smallest_block = uint64_t{4} << 10;  // bytes, powers of two
  uint64_t largest_block = uint64_t{32} << 30;

  std::string store;  // a directory in which the segments survive the process; empty: none
  bool sync = false;  // they survive a crash of the host too, see box/server/storage/store.h

  std::string token;  // what clients have to know; empty: whoever reaches the box may use it
  bool seal = true;   // with a token: what tcp carries, and control on verbs; as the clients do
  std::chrono::milliseconds lease{30'000};
  uint32_t most_clients = 4096;

  // Threads; 0: chosen from the processors that this process may use.
  uint32_t handlers = 0;            // carry out requests
  uint32_t accumulate_threads = 0;  // share a large accumulate
  uint32_t receivers = 0;           // run the sockets' event loops

  VerbsChoice verbs = VerbsChoice::kAuto;
  std::string verbs_host;   // the address of an RDMA device's network interface; empty: the first
  uint16_t verbs_port = 0;  // 0: any
};

// The addresses of `options.listen`.
// Throws Error(kInvalid) or Error(kUnsupported), which says what to change, for options that make
// no box. The pool checks its own (memory/pool.h).
std::vector<smb::Address> check(const ServerOptions& options);

// Returns the path of the Unix socket of this process's next box, where the options name none: a
// new name in socket_directory(), which nobody can foresee. Removes sockets there that killed boxes
// have left.
std::string new_socket_path();

}  // namespace hbm::box
