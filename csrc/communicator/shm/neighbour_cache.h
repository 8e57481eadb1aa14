// The neighbours that this process has already, for all its groups.
//
// Threads: all functions may be called from any thread. A forked child starts with none.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/rendezvous.h"
#include "communicator/shm/neighbours.h"

namespace hbm::shm {

// Names a member's segment among those of all processes.
std::string neighbour_key(const bootstrap::Member& member);

// Null if there is none: nobody has remembered it, or no group uses it any more.
std::shared_ptr<const Neighbour> known_neighbour(const std::string& key);

void remember_neighbour(const std::string& key, const std::shared_ptr<const Neighbour>& neighbour);

}  // namespace hbm::shm
