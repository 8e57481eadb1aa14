// MPICH's ABI, as its mpi.h has it.
#include <mpi.h>

#include "communicator/mpi/abi.h"

using TestedAbi = hbm::communicator::mpi::MpichAbi;
#include "mpi_abi_facts.inc"
