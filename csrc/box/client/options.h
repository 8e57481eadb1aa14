// The options of a client and of its requests, set by the user or the environment.
//
// Threads: any, while no thread changes the environment.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "box/protocol/protocol.h"

namespace hbm::box::client {

enum class TransportChoice { kAuto, kShm, kTcp, kVerbs };

// Throws Error(kInvalid), naming the four choices, if `name` is not auto, shm, tcp or verbs.
TransportChoice parse_transport(const std::string& name);
const char* transport_name(protocol::TransportKind transport) noexcept;
const char* transport_name(TransportChoice choice) noexcept;

struct ClientOptions {
  std::string url;    // smb://host:port or smb+unix:///path
  std::string token;  // empty: none
  // kAuto: shm if the box's Unix socket can be reached on the same kernel, else verbs if a route
  // resolves on an RDMA device, else tcp. With any other choice, the client uses that transport, or
  // fails to connect.
  TransportChoice transport = TransportChoice::kAuto;
  uint32_t lanes = 4;  // connections of tcp, queue pairs of verbs
  // With a token: authenticate all frames on tcp after the join, and control messages on verbs.
  // Each connection has its own keys. So each end detects changes on the network. Must agree with
  // the option of the box.
  bool seal = true;
  bool read_only = false;  // the client cannot write, and the box enforces it
  std::chrono::milliseconds connect_timeout{5000};
  std::chrono::milliseconds reconnect_timeout{60000};
  std::chrono::milliseconds timeout{0};  // of each operation; 0: only reconnect_timeout applies

  // Called about ten times a second by each thread that waits for an operation. An exception ends
  // the wait, and leaves the operation unchanged.
  std::function<void()> while_waiting;
};

struct AllocOptions {
  uint64_t size = 0;   // bytes; 0 with kAttach: any size
  protocol::Id key{};  // none: the box chooses one
  protocol::AllocMode mode = protocol::AllocMode::kAuto;
  bool temporary = false;  // deleted when its last attachment ends
  bool read_only = false;
};

// target[i] += scale * source[i], or target[i] = scale * source[i], executed by the box.
struct Accumulation {
  Dtype dtype{};  // of the target
  std::optional<Dtype> source_dtype =
      {};  // none: as the target; accumulate_unsupported() has the valid pairs
  Combine combine = Combine::kAdd;
  double scale = 1.0;
  uint64_t bytes = 0;          // of the target; a multiple of its element's size
  uint64_t target_offset = 0;  // bytes; a multiple of the size of the target's element
  uint64_t source_offset = 0;  // bytes; a multiple of the size of the source's element
};

// Returns HBMCOMM_TOKEN if it is set, else the first line of the file that HBMCOMM_TOKEN_FILE
// names, else the first line of ~/.config/hbmcomm/token, else "". Throws Error(kInvalid) if the
// file that HBMCOMM_TOKEN_FILE names cannot be read, or its first line is empty.
std::string token_from_environment();

// Returns the options for the box HBMCOMM_BOX, over HBMCOMM_BOX_TRANSPORT (default auto), with the
// token of token_from_environment(), and without authentication if HBMCOMM_BOX_SEAL is 0. Throws
// Error(kInvalid) if HBMCOMM_BOX is missing, or another of these variables has an invalid value.
ClientOptions options_from_environment();

}  // namespace hbm::box::client
