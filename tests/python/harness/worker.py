"""One rank of a pool: forms its groups, then runs the functions that the test process sends.

The rank receives (function, arguments, seed) over a pipe, and answers Ok(result) or Error(...). At
the pipe's end of file, when the test process is done or has ended, the rank exits normally, so that
a hang at exit shows. Output goes to a file in the pool's folder. On SIGUSR1 the rank writes the
stacks of all threads there.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import _get_default_group

from harness import accelerator
from harness.context import BACKEND, Context

FORMING = timedelta(seconds=60)


@dataclass
class Ok:
    result: Any


@dataclass
class Error:
    kind: str  # name of the exception's class
    trace: str


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def form_groups(folder: Path, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Makes the default group over BACKEND and returns the reference group over Gloo.

    A timeout shorter than FORMING applies only after all ranks have formed both groups.
    """
    store = FileStore(str(folder / "store"), size)
    forming = max(timeout, FORMING)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=forming)
    gloo: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=FORMING)
    if timeout < FORMING:
        dist.barrier()
        _get_default_group().set_timeout(timeout)
        dist.barrier(gloo)
    return gloo


def main(
    pipe: Connection,
    folder: Path,
    rank: int,
    size: int,
    timeout: timedelta | None,
    device: str = "cpu",
) -> None:
    """Run a rank. timeout: the group's timeout; None: a bare rank, which forms no group."""
    log = os.open(log_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecated")
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    torch.set_num_threads(1)
    gc.freeze()  # the collector skips the warm process' imports

    gloo: dist.ProcessGroup | None = None
    try:
        if device == accelerator.NAME:
            accelerator.load()
        if timeout is not None:
            gloo = form_groups(folder, rank, size, timeout)
    except Exception as error:
        pipe.send(Error(type(error).__name__, traceback.format_exc()))
        return
    pipe.send(Ok(None))
    while True:
        try:
            function, arguments, seed = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        answer: Ok | Error
        try:
            random.seed(f"{seed}/{rank}")
            torch.manual_seed(seed)  # models begin alike on all ranks
            answer = Ok(function(Context(rank, size, gloo, folder, seed, device), *arguments))
        except Exception as error:
            answer = Error(type(error).__name__, traceback.format_exc())
        sys.stdout.flush()
        pipe.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()
