// A handle names a process to the other members of a future group. Its text has all that they need
// to meet the process without a store of their own. The program passes the texts on, for example
// through a file or a socket.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/claim.h"

namespace hbm::bootstrap {

struct Handle {
  std::string id;                      // random_id(), unique among all handles
  Claim process;                       // the process that has made the handle
  std::string network;                 // network_id() of that process
  int port = 0;                        // at which that process serves a store for the members
  std::vector<std::string> addresses;  // of that process' machine
};

// Returns a name of the network in which the addresses of this process are valid, 127.0.0.1
// included. Two processes of one network have equal names.
std::string network_id();

// Returns a new handle of this process, whose store is served at `port`.
Handle make_handle(int port);

// Encodes the handle as one line of text, which decode_handle() reads. decode_handle() throws
// Error(kInvalid), with the text, if the text is no handle.
std::string encode(const Handle& handle);
Handle decode_handle(const std::string& text);

// The members of a future group. A member's rank is its index.
struct Roster {
  std::vector<Handle> handles;
  int rank = 0;  // of this process

  int size() const { return static_cast<int>(handles.size()); }
};

// Returns the members that `texts` names, in that order if `ordered`. Otherwise chooses an order
// that is the same on all ranks, in which the members of a machine follow one another. `own`: the
// id of this process' handle. Throws Error(kInvalid) if a text is no handle, a handle stands twice,
// or this process' handle is absent.
Roster make_roster(const std::vector<std::string>& texts, bool ordered, const std::string& own);

}  // namespace hbm::bootstrap
