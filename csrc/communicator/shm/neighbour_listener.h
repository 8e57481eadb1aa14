// Where a rank listens for those that want to become its neighbours.
//
// Threads: none of its own; used by one at a time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "bootstrap/rendezvous.h"
#include "communicator/shm/peer_socket.h"

namespace hbm::shm {

class NeighbourListener {
 public:
  // Listens for ranks in this network namespace from now on: they may call as soon as they know the
  // name, and are taken in later.
  NeighbourListener();

  const std::string& name() const noexcept { return name_; }  // for bootstrap::Member::listener

  // Listens for ranks in other network namespaces too, by a file in socket_directory(). Where that
  // is the default and cannot be used, they cannot come.
  // Throws Error(kUnavailable) if HBMCOMM_SOCKET_DIR names a directory that cannot be used.
  void open_to_other_networks();
  void close_to_other_networks();  // those who have called stay

  // The callers since the last time, but for strangers (other users).
  std::vector<Descriptor> callers();

  // Calls another rank; none if it cannot be reached from here, or is a stranger's.
  // Throws Error(kUnavailable) when too many call at once.
  static Descriptor call(const bootstrap::Member& self, const bootstrap::Member& other);

 private:
  void take_in(int listener);

  const std::string name_;
  const Descriptor listener_;
  std::optional<SocketFile> file_;
  std::vector<Descriptor> callers_;
};

}  // namespace hbm::shm
