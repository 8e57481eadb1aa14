// Compares MPICH's ABI in abi.h with MPICH's mpi.h.
#include <mpi.h>

#include "communicator/mpi/abi.h"

using TestedAbi = hbm::communicator::mpi::MpichAbi;
#include "mpi_abi_facts.inc"
