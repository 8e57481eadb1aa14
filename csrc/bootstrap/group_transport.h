// How the ranks of a group reach one another: Options.transport in Python, which is the reference.
#pragma once

#include <string>

namespace hbm {

enum class GroupTransport {
  kAuto,  // shared memory within a node, MPI between nodes
  kShm,   // shared memory, for a group on one node
  kMpi,   // MPI between all ranks
};

// "auto", "shm" or "mpi".
std::string transport_name(GroupTransport transport);

// Throws Error(kInvalid), which names `source`, for any other text.
GroupTransport parse_transport(const std::string& text, const std::string& source);

// Returns the transport that HBMCOMM_NODE names; kAuto if it is unset or empty. Throws as
// parse_transport() does.
GroupTransport default_transport();

}  // namespace hbm
