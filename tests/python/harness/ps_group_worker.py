"""A worker of a parameter server with the group's own box, under a launcher. Rank 0 kills itself.

Its arguments are the steps of the others, and the steps of rank 0. Each other rank writes the
weights that it sees in the end.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from harness.ps_models import Cells
from torch_hbmcomm import Options, ParameterServer, group_boxes
from torch_hbmcomm.parameter_server import Downpour


def main(steps: int, steps_of_rank_0: int) -> None:
    group_boxes._LEASE = 4.0
    dist.init_process_group("hbm", pg_options=Options(parameter_server="auto"))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Cells(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ParameterServer(model, optimizer, rule=Downpour("sum"), overlap=False) as ps:
        for step in range(steps):
            if rank == 0 and step == steps_of_rank_0:
                os.kill(os.getpid(), signal.SIGKILL)
            model.add_one(rank)
            ps.step()
        ps.finish(wait=True)
        ps.pull()
    print(f"rank {rank} sees {model.seen()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
