// The options of a client, which its user or the environment sets, and of its requests.
//
// Threads: any, as long as none changes the environment.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "box/protocol/protocol.h"

namespace hbm::client {

enum class TransportChoice { kAuto, kShm, kTcp, kVerbs };

// Throws Error(kInvalid), naming the four choices, for any name but auto, shm, tcp and verbs.
TransportChoice parse_transport(const std::string& name);
const char* transport_name(smb::TransportKind transport) noexcept;
const char* transport_name(TransportChoice choice) noexcept;

struct ClientOptions {
  std::string url;    // smb://host:port or smb+unix:///path
  std::string token;  // empty: none
  // kAuto: shm where the box's Unix socket can be reached on the same kernel, else verbs where a
  // route resolves on an RDMA device, else tcp. Any other that does not work is an error.
  TransportChoice transport = TransportChoice::kAuto;
  uint32_t lanes = 4;  // connections of tcp, queue pairs of verbs
  // With a token, and as the box does: a key of each connection's own signs what tcp carries, and
  // control messages on verbs, so that nobody on the way can change it.
  bool seal = true;
  bool read_only = false;  // the client cannot write, and the box enforces it
  std::chrono::milliseconds connect_timeout{5000};
  std::chrono::milliseconds reconnect_timeout{60000};
  std::chrono::milliseconds timeout{0};  // of each operation; 0: none but reconnect_timeout

  // Called about ten times a second by each thread that waits for an operation. What it throws ends
  // the wait and leaves the operation as it is.
  std::function<void()> while_waiting;
};

struct AllocOptions {
  uint64_t size = 0;  // bytes; 0 with kAttach: whatever it has
  smb::Id key{};      // none: the box chooses one
  smb::AllocMode mode = smb::AllocMode::kAuto;
  bool temporary = false;  // deleted when its last attachment ends
  bool read_only = false;
};

// target[i] += scale * source[i], or target[i] = scale * source[i], carried out by the box.
struct Accumulation {
  Dtype dtype{};                           // of the target
  std::optional<Dtype> source_dtype = {};  // none: the same; accumulate_unsupported() has the pairs
  Combine combine = Combine::kAdd;
  double scale = 1.0;
  uint64_t bytes = 0;          // of the target; a multiple of its element's size
  uint64_t target_offset = 0;  // bytes, each a multiple of the element's size there
  uint64_t source_offset = 0;
};

// HBMCOMM_TOKEN, else what is in the file HBMCOMM_TOKEN_FILE names, else in
// ~/.config/hbmcomm/token if there is one, without the line's end; else empty.
// Throws Error(kInvalid) when HBMCOMM_TOKEN_FILE cannot be read or is empty.
std::string token_from_environment();

// The box at HBMCOMM_BOX by HBMCOMM_BOX_TRANSPORT (auto), with the token above, and unsealed if
// HBMCOMM_BOX_SEAL is 0.
// Throws Error(kInvalid) when HBMCOMM_BOX is not set, or HBMCOMM_BOX_SEAL is neither 0 nor 1.
ClientOptions options_from_environment();

}  // namespace hbm::client
