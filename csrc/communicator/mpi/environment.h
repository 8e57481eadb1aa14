// The environment variables that MPI reads when it starts.
//
// Threads: the environment belongs to the process. No other thread may change it during a call.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hbm::mpi {

// Sets the environment for an MPI_Init that hbm answers (pmi.h), and restores it at the end. Hides
// the launcher's variables. Overrides variables with which MPI_Init ends the process, hangs, or
// leaves files behind.
class StartEnvironment {
 public:
  StartEnvironment();
  ~StartEnvironment();
  StartEnvironment(const StartEnvironment&) = delete;
  StartEnvironment& operator=(const StartEnvironment&) = delete;

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> before_;
};

// Excludes UCX's cross-memory attach, which aborts this process when the peer dies in mid-copy,
// unless the user has set UCX_TLS. Without `shares_memory` UCX uses no
// shared memory at all. An empty UCX_TLS counts as unset.
void set_transport_defaults(bool shares_memory = true);

// Returns the variables with which MPI_Init may fail, as "UCX_NET_DEVICES=eth7 UCX_TLS=rc", sorted;
// empty if there are none: those that choose devices, transports or algorithms. MPI ends the
// process if it cannot follow them.
std::string risky_variables();

}  // namespace hbm::mpi
