"""`hbmcomm info --pid` names /proc/PID/numa_maps, which shows a process's segments from outside."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.segments import held, of_groups, opened
from typer.testing import CliRunner

from torch_hbmcomm import memory
from torch_hbmcomm.cli import app

BYTES = 24 << 20

filled: list[torch.Tensor] = []  # of this rank, from fill() to forget()


@pytest.mark.parametrize("arguments", [["--pid", "1"], ["--json", "--pid", "4711"], ["--pid=x"]])
def test_pid_says_what_to_use_instead(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["info", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    for words in ("--pid", "/proc/PID/numa_maps", "memfd:hbmcomm-", "numastat -p PID"):
        assert words in line


def test_pid_is_not_among_the_options() -> None:
    assert "--pid" not in CliRunner().invoke(app, ["info", "--help"]).output


def touched(pid: int, policy: str) -> int:
    """Return the bytes of the policy's segments that the process has touched, from numa_maps."""
    found = 0
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if f"memfd:hbmcomm-{policy}" in line:
            page = re.search(r"kernelpagesize_kB=(\d+)", line)
            pages = sum(int(count) for count in re.findall(r" N\d+=(\d+)", line))
            found += pages * (int(page[1]) << 10 if page else 0)
    return found


def fill(context: Context) -> int:
    """Allocate memory in the segments until forget(). Returns the bytes of all own segments."""
    gc.collect()  # a collection after held() could free memory of an earlier test
    filled.append(memory.empty(BYTES // 4).fill_(1))
    dist.all_reduce(filled[-1])
    return held()


def forget(context: Context) -> None:
    filled.clear()


@beyond_gloo
@pytest.mark.ranks(1, 2)
@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel tells no nodes")
def test_segments_of_a_rank_and_its_peers(pool: Pool, ranks: int) -> None:
    """A rank holds its own segments open, and maps its local peers' segments."""
    heights = pool.run(fill)
    try:
        for rank, pid in enumerate(pool.pids):
            own = opened(pid)
            assert max(own.values()) >= BYTES
            assert sum(own.values()) == heights[rank]
            assert touched(pid, "preferred") >= BYTES
            peers = [opened(other) for other in pool.pids if other != pid]
            foreign = of_groups(pid) - own.keys()
            assert foreign <= {inode for other in peers for inode in other}
            assert all(foreign & other.keys() for other in peers)
    finally:
        pool.run(forget)


def fork_sleeper(context: Context) -> int:
    memory.empty(10).fill_(1)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def end_child(context: Context, children: list[int]) -> None:
    os.kill(children[context.rank], signal.SIGKILL)
    os.waitpid(children[context.rank], 0)


@beyond_gloo
@pytest.mark.ranks(2)
def test_a_child_shares_its_parents_segments(pool: Pool) -> None:
    """Fork a child: it shares its parent's own segments, but no segment of a local peer."""
    children = pool.run(fork_sleeper)
    try:
        for parent, child in zip(pool.pids, children, strict=True):
            assert of_groups(child)
            assert of_groups(child) <= opened(parent).keys()
            assert opened(child).keys() == opened(parent).keys()
    finally:
        pool.run(end_child, children)
