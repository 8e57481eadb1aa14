"""A soak: checks for hours that groups leave nothing behind. `make soak`, or

    .venv/bin/python tests/python/soak.py --cycles 1000 --kills 200 --minutes 30 --seed 7

runs three parts: cycles of init_process_group and destroy_process_group, ranks that are killed at
random moments, and random collectives on groups that come and go, compared with Gloo's. Each part
counts descriptors, threads, mappings, resident memory and files in /dev/shm before and after. It
prints the counts, and fails if one grew. The same seed makes the same choices.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import surroundings

surroundings.settle()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import Context, Pool, shm  # noqa: E402
from harness.deaths import Fate, Job  # noqa: E402
from harness.segments import mappings  # noqa: E402

RANKS = 3
GROWTH = 16 << 20  # bytes of resident memory that allocators and caches may take over hours
TIMEOUT = timedelta(seconds=120)
WARM_UP = 20  # cycles before the first count
ROUNDS = 60  # least rounds of mixed work before the first count, to meet every size
IDLE = 3.0  # seconds in which a group's idle threads end

Count = dict[str, int]

M_MMAP_THRESHOLD = -3  # malloc.h
LARGE = 128 << 10  # bytes


def return_large_blocks() -> None:
    """Make malloc return every freed large block to the kernel.

    By default, malloc's threshold for large blocks grows with freed blocks. Freed blocks may then
    stay at the end of an arena: tens of megabytes, or none, by chance.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE) == 1


def count() -> Count:
    gc.collect()
    time.sleep(IDLE)
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(mappings("self")),
        "resident": int(status.partition("RssAnon:")[2].split()[0]) << 10,
    }


def form(context: Context, name: str) -> None:
    url = f"file://{context.folder}/{context.seed}-{name}"
    dist.init_process_group(
        "hbm", init_method=url, rank=context.rank, world_size=context.size, timeout=TIMEOUT
    )


def cycle(context: Context, cycles: int) -> tuple[Count, Count]:
    """Form the default group and destroy it, `cycles` times."""

    def once(number: int) -> None:
        form(context, str(number))
        data = torch.full((1000,), float(context.rank))
        dist.all_reduce(data)
        assert (data == sum(range(context.size))).all()
        dist.destroy_process_group()

    return_large_blocks()
    for number in range(WARM_UP):
        once(number)
    before = count()
    for number in range(WARM_UP, WARM_UP + cycles):
        once(number)
    return before, count()


def mix(context: Context, minutes: float) -> tuple[Count, Count]:
    """Run random collectives on groups that come and go. Compare each result with Gloo's."""
    return_large_blocks()
    form(context, "mixed")
    gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)
    for _ in range(ROUNDS):
        round_of_work(context.shared_random, context.generator, gloo)
    work_for(context, minutes / 10, gloo)
    before = count()
    work_for(context, minutes, gloo)
    after = count()
    dist.destroy_process_group()
    return before, after


def work_for(context: Context, minutes: float, gloo: dist.ProcessGroup) -> None:
    end = time.monotonic() + 60 * minutes
    going = torch.ones(1)
    while going:
        round_of_work(context.shared_random, context.generator, gloo)
        going.fill_(time.monotonic() < end)
        dist.broadcast(going, 0)  # rank 0's clock counts


def round_of_work(
    choices: random.Random, generator: torch.Generator, gloo: dist.ProcessGroup
) -> None:
    group = dist.new_group(timeout=TIMEOUT)
    for _ in range(choices.randrange(1, 8)):
        elements = choices.choice([1, 7, 1000, 65_536, 1_000_003])
        ours = torch.randint(-9, 9, (elements,), generator=generator).to(
            choices.choice([torch.float32, torch.float64, torch.int64])
        )
        theirs = ours.clone()
        operation = choices.choice(OPERATIONS)
        operation(ours, group)
        operation(theirs, gloo)
        assert torch.equal(ours, theirs), (operation.__name__, elements, ours.dtype)
    dist.destroy_process_group(group)


def all_reduce(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(data, group=group, async_op=True)
    assert work is not None
    work.wait()


def broadcast(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(data, 1, group=group)


def all_gather(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    parts = [torch.empty_like(data) for _ in range(RANKS)]
    dist.all_gather(parts, data, group=group)
    data.copy_(torch.stack([part * (rank + 1) for rank, part in enumerate(parts)]).sum(0))


def round_trip(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    got = torch.empty_like(data)
    sent = dist.isend(data, (rank + 1) % RANKS, group=group)
    dist.recv(got, (rank - 1) % RANKS, group=group)
    assert sent is not None
    sent.wait()
    data.copy_(got)


OPERATIONS: list[Callable[[torch.Tensor, dist.ProcessGroup], None]] = [
    all_reduce,
    broadcast,
    all_gather,
    round_trip,
]


def grown(counts: list[tuple[Count, Count]]) -> list[str]:
    """Return a line for each count that grew, with its rank."""
    found = []
    for rank, (before, after) in enumerate(counts):
        for what, early in before.items():
            allowed = GROWTH if what == "resident" else 0
            if after[what] > early + allowed:
                found.append(f"{what} of rank {rank}: {early:,} before, {after[what]:,} after")
    return found


def reduce_again(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(100_000))


def kill(kills: int, seed: int) -> list[str]:
    """Kill one rank in each of `kills` jobs, before an operation or in the middle of one."""
    choices = random.Random(seed)
    for number in range(kills):
        size = choices.randrange(2, 5)
        turn = choices.choice([None, choices.randrange(2, 200)])
        fate = Fate(choices.randrange(size), turn=turn)
        survivors = Job(size).run(reduce_again, fate)
        for survivor in survivors:
            if f"rank {fate.victim} (pid" not in survivor.text:
                return [f"job {number} of {size} ranks, {fate}: {survivor}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    shm.isolate()
    files = shm.entries()

    def in_a_pool(work: Callable[..., tuple[Count, Count]], amount: float) -> list[str]:
        pool = Pool(RANKS, bare=True)
        try:
            counts = pool.run(work, amount, limit=86_400, seed=asked.seed)
            assert pool.close() == [0] * RANKS
        finally:
            pool.kill()
        for rank, (before, after) in enumerate(counts):
            changes = (f"{what} {before[what]:,} to {after[what]:,}" for what in before)
            print(f"  rank {rank}: {', '.join(changes)}")
        return grown(counts)

    parts: dict[str, Callable[[], list[str]]] = {
        f"{asked.cycles} cycles of init and destroy": lambda: in_a_pool(cycle, asked.cycles),
        f"{asked.kills} kills": lambda: kill(asked.kills, asked.seed),
        f"{asked.minutes:g} minutes of mixed work": lambda: in_a_pool(mix, asked.minutes),
    }
    failures = []
    for title, part in parts.items():
        begin = time.monotonic()
        print(title, flush=True)
        found = part()
        found += [f"/dev/shm/{name} was left" for name in sorted(shm.left_since(files))]
        print(f"  {'; '.join(found) or 'nothing grew, nothing left'}", end=" ")
        print(f"({time.monotonic() - begin:.0f} s)", flush=True)
        failures += found
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
