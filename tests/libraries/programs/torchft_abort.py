"""Two ranks use torchft's process group without a manager: configure, abort, set_timeout, errored.

Rank 0 prints the error of a pending allreduce of the group that it aborted.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch._C._distributed_c10d import AllreduceOptions
from torchft import ProcessGroupGloo
from torchft.process_group import create_store_client

RANKS = 2
TIMEOUT, LATER = timedelta(seconds=120), timedelta(seconds=121)


def main() -> None:
    rank = int(os.environ["RANK"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store = create_store_client(f"{address}/meeting", TIMEOUT)
    group = ProcessGroupGloo(timeout=TIMEOUT)

    def form(name: str) -> None:
        group.configure(f"{address}/{name}", f"replica_{rank}", rank, RANKS)

    def meet(name: str) -> None:
        store.set(f"{name} {rank}", "")
        store.wait([f"{name} {other}" for other in range(RANKS)])

    def check_sum() -> None:
        data = torch.full((1000,), rank + 1.0)
        group.allreduce([data], AllreduceOptions()).wait()
        assert (data == 3).all(), data

    form("first")
    check_sum()
    if rank == 0:
        pending = group.allreduce([torch.ones(1000)], AllreduceOptions())
        group.abort()
        try:
            pending.wait()
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}")
        assert group.errored() is None  # torchft's own: it does not ask the backend
    meet("aborted")

    # A group with a fresh prefix takes the place of the aborted one, and of one that works.
    for name in ("second", "third"):
        form(name)
        check_sum()

    # torchft keeps a new timeout for the groups that it forms later.
    group.set_timeout(LATER)
    form("patient")
    check_sum()
    assert group.parent._get_backend(torch.device("cpu")).options._timeout == LATER
    meet("done")


if __name__ == "__main__":
    main()
