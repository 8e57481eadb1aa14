// The sockets on which a rank listens for ranks that want to become its local peers.
//
// Threads: starts none; one thread at a time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "bootstrap/rendezvous.h"
#include "communicator/shm/peer_socket.h"

namespace hbm::communicator::shm {

class PeerListener {
 public:
  // Starts to listen for ranks in this network namespace. They may call as soon as they know the
  // name; callers() accepts them later.
  PeerListener();

  const std::string& name() const noexcept { return name_; }  // bootstrap::Member::listener

  // Also listens for ranks in other network namespaces, at a socket file in socket_directory(). If
  // that is the default directory and unusable, such ranks cannot connect. Throws
  // Error(kUnavailable) if HBMCOMM_SOCKET_DIR names an unusable directory.
  void open_to_other_networks();
  void close_to_other_networks();  // callers stay connected

  // Returns the connections that callers have made since the last call of this function. Closes
  // connections of other users' processes.
  std::vector<Descriptor> callers();

  // Calls another rank. Returns no descriptor if the rank cannot be reached, or is a process of
  // another user. Throws Error(kUnavailable) if too many ranks call at the same time.
  static Descriptor call(const bootstrap::Member& self, const bootstrap::Member& other);

 private:
  void take_in(int listener);

  const std::string name_;
  const Descriptor listener_;
  std::optional<SocketFile> file_;
  std::vector<Descriptor> callers_;
};

}  // namespace hbm::communicator::shm
