// A trial of MPI_Init in a process of its own. MPI ends a process in which MPI_Init fails, for
// example because a variable names an absent network device. If a variable chooses devices,
// transports or algorithms (environment.h), each rank first starts a program that calls MPI_Init as
// the rank would. If MPI_Init ends the program, the rank throws.
//
// Threads: as World::form(), the only caller.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/pmi.h"

namespace hbm::communicator::mpi {

// Sets the program and its first arguments; without a program there are no trials. The program gets
// two more arguments, the path of the library and the value of MPI_THREAD_MULTIPLE, and finds the
// job in PMI_FD. It calls MPI_Init_thread, writes the line kTrialPassed and waits until it is
// killed.
void set_trial_program(std::vector<std::string> program);

inline constexpr const char* kTrialPassed = "hbm: MPI_Init has returned";

// Tries MPI_Init in a process for each rank; all ranks call this. `variables`: named in errors.
// Calls `check` repeatedly, and passes its exceptions on. The program has ended when the call
// returns, and leaves nothing behind. REQUIRES: a StartEnvironment, which the program inherits.
// Throws Error(kUnavailable) with the last output of the program if MPI_Init ends it. Throws
// Error(kTimeout) if MPI_Init does not return by the deadline or within a minute.
void try_initialise(const MpiLibrary& library, const std::shared_ptr<bootstrap::KeyValue>& store,
                    const PmiResponder::Job& job, const std::string& variables,
                    const std::function<void()>& check);

}  // namespace hbm::communicator::mpi
