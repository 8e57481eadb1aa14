"""Starts ranks: fresh processes, as torchrun starts them. Also combines their measurements."""

import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from torch_hbmcomm.bench.rounds import Samples, Timed, interleave

T = TypeVar("T")


class RankFailed(RuntimeError):
    """A rank ended with an error; the message is the error of the first rank to fail."""


def launch(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` on each rank. Returns the results, in the order of the ranks.

    `function` and its arguments are pickled, so `function` must be a module's, not a closure.
    HBMCOMM_INSTEAD_OF is unset, in this process too: with it the rival Gloo would be hbm.
    """
    os.environ.pop("HBMCOMM_INSTEAD_OF", None)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        returned = elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        cause = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        raise RankFailed(f"rank {rank} failed: {cause}") from error
    return [returned[rank] for rank in range(ranks)]


def join() -> None:
    """Make the default group, which is never timed. It serves barriers, and makes the lengths of
    turns equal on all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def take_turns(
    contenders: Mapping[str, Timed], rounds: int, alone: Sequence[str]
) -> dict[str, Samples]:
    """Interleave contenders. All ranks call it, with the same names. REQUIRES: join()."""
    return interleave(contenders, rounds, alone, barrier=dist.barrier, agree=_of_first_rank)


def _of_first_rank(value: int) -> int:
    shared = torch.tensor(value)
    dist.broadcast(shared, src=0)
    return int(shared)


def slowest(of_ranks: Sequence[Samples]) -> Samples:
    """Return, for each sample, the time of the slowest rank: a call is over when it has returned on
    all ranks."""
    return Samples(
        of_ranks[0].calls,
        [max(times) for times in zip(*(one.interleaved for one in of_ranks), strict=True)],
        [max(times) for times in zip(*(one.alone for one in of_ranks), strict=True)],
    )


def barrier() -> None:
    """Wait for all ranks, so that no rank's imports are part of another rank's time."""
    store, rank, ranks = next(rendezvous("env://"))
    store.set(f"bench/arrived/{rank}", "")
    store.wait([f"bench/arrived/{peer}" for peer in range(ranks)])


def seconds_after_barrier(action: Callable[[], object]) -> float:
    torch.set_num_threads(1)
    barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def with_progress(cells: Sequence[T]) -> Iterable[T]:
    """Yield the cells, with a progress bar on rank 0's terminal. The bar is drawn only between
    cells, because a thread that draws it would take time from the measured calls."""
    terminal = Console(stderr=True)
    hidden = dist.get_rank() != 0 or not terminal.is_terminal
    return track(cells, auto_refresh=False, console=terminal, transient=True, disable=hidden)
