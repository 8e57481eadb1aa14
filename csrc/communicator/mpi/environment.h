// The environment variables that MPI reads when it starts.
//
// Threads: the environment belongs to the process. No other thread may change it during a call.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hbm::communicator::mpi {

// Sets the environment for an MPI_Init that hbm's responder serves (pmi.h), and restores it in the
// destructor. Hides the variables of the launcher. Overrides variables that make MPI_Init end the
// process, hang, or leave files behind.
class StartEnvironment {
 public:
  StartEnvironment();
  ~StartEnvironment();
  StartEnvironment(const StartEnvironment&) = delete;
  StartEnvironment& operator=(const StartEnvironment&) = delete;

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> before_;
};

// Excludes UCX's cross-memory attach, which aborts this process if the peer dies during a copy. If
// `shares_memory` is false, excludes all shared memory of UCX instead. Does nothing if the user has
// set UCX_TLS to a non-empty value.
void set_transport_defaults(bool shares_memory = true);

// Returns the variables with which MPI_Init may fail, sorted, as in "UCX_NET_DEVICES=eth7
// UCX_TLS=rc"; empty if there are none. These variables choose devices, transports or algorithms.
// MPI ends the process if it cannot use the choice.
std::string risky_variables();

}  // namespace hbm::communicator::mpi
