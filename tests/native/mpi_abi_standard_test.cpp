// The standard ABI, as MPICH's mpi_abi.h has it.
#include <mpi_abi.h>

#include "communicator/mpi/abi.h"

using TestedAbi = hbm::communicator::mpi::StandardAbi;
#include "mpi_abi_facts.inc"
