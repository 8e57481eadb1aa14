// The transport between the ranks of a group: Options.transport in Python, where it is documented.
#pragma once

#include <string>

namespace hbm::bootstrap {

enum class GroupTransport {
  kAuto,  // shared memory within a node, MPI between nodes
  kShm,   // shared memory, for a group on one node
  kMpi,   // MPI between all ranks
};

// Returns "auto", "shm" or "mpi".
std::string transport_name(GroupTransport transport);

// Parses a name that transport_name() returns. Throws Error(kInvalid) naming `source` for any other
// text.
GroupTransport parse_transport(const std::string& text, const std::string& source);

// Returns the transport that HBMCOMM_NODE names; kAuto if it is unset or empty. Throws as
// parse_transport() does.
GroupTransport default_transport();

}  // namespace hbm::bootstrap
