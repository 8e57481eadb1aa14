// Compares the standard ABI in abi.h with MPICH's mpi_abi.h.
#include <mpi_abi.h>

#include "communicator/mpi/abi.h"

using TestedAbi = hbm::communicator::mpi::StandardAbi;
#include "mpi_abi_facts.inc"
