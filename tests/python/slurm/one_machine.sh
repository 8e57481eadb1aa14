#!/usr/bin/env bash
# A Slurm cluster on this machine alone, for as long as a command runs:
#
#     sudo tests/python/slurm/one_machine.sh srun -n 4 --mpi=pmi2 python script.py
#
# It has a directory, ports and a configuration of its own, so that it neither needs nor touches an
# installed cluster. Two nodes stand for two machines (partition "nodes"), with as many CPUs as one
# test needs, whatever the machine has. There is no authentication: whoever reaches the ports of this
# machine could run commands as root while the command lasts, so they are open to no one else.
#
# Needs root and Debian's or Ubuntu's slurm-wlm. Exits as the command does; 1 if the cluster does not
# come up, with its logs.
set -euo pipefail

slots=8
