"""Times loops side by side: in every round, each in turn runs a block of calls."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torch_hbmcomm.bench.contender import Loop

_BLOCK_SECONDS = 5e-3  # long against the skew with which ranks leave a barrier
_MOST_CALLS = 10_000

Samples = dict[str, list[float]]
"""For each loop, microseconds a call by round."""


def interleave(loops: Mapping[str, Loop], rounds: int) -> Samples:
    """All ranks call it with the same names. REQUIRES: a default group, which is not timed."""
    calls = {name: _block_length(loop) for name, loop in loops.items()}
    samples: Samples = {name: [] for name in loops}
    with _without_collector():
        for _ in range(rounds):
            for name, loop in loops.items():
                dist.barrier()
                loop(1)  # brings this one's buffers and threads back to work
                samples[name].append(_seconds(loop, calls[name]) / calls[name] * 1e6)
    return samples


def _block_length(loop: Loop) -> int:
    """How many calls fill a block: rank 0's answer, which every rank gets."""
    loop(1)
    dist.barrier()
    estimate = _seconds(loop, 3) / 3
    calls = torch.tensor(max(1, min(_MOST_CALLS, int(_BLOCK_SECONDS / estimate))))
    dist.broadcast(calls, src=0)
    return int(calls)


def _seconds(loop: Loop, calls: int) -> float:
    start = time.perf_counter()
    loop(calls)
    return time.perf_counter() - start


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
