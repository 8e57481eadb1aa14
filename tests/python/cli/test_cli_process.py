"""`hbmcomm info --pid`: what another process has, told from outside of it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.segments import held, mappings
from typer.testing import CliRunner, Result

from torch_hbmcomm import memory
from torch_hbmcomm.cli import app
from torch_hbmcomm.cli.process import InspectionError, inspect

BYTES = 24 << 20

kept: list[torch.Tensor] = []  # in a rank


def info(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["info", *arguments])


def fill(context: Context) -> int:
    """Returns what the segments then hold, until forget()."""
    kept.append(memory.empty(BYTES // 4).fill_(1))
    dist.all_reduce(kept[-1])
    return held()


def forget(context: Context) -> None:
    kept.clear()


@beyond_gloo
@pytest.mark.ranks(1, 2)
def test_segments_and_neighbours(pool: Pool, ranks: int) -> None:
    heights = pool.run(fill)
    try:
        for rank, pid in enumerate(pool.pids):
            found = json.loads(info("--pid", str(pid), "--json").output)
            assert found["pid"] == pid
            (own,) = [s for s in found["segments"] if s["policy"] == "preferred"]
            assert own["owner"] == pid and own["name"] == "memfd:hbmcomm-preferred"
            assert own["held_bytes"] >= BYTES
            assert sum(s["held_bytes"] for s in found["segments"]) == heights[rank]
            assert own["size_bytes"] > own["resident_bytes"] >= BYTES
            assert sum(own["by_node"].values()) == own["resident_bytes"]
            neighbours = [n for n in found["neighbours"] if n["policy"] == "preferred"]
            assert {n["owner"] for n in neighbours} == set(pool.pids) - {pid}
            assert all(n["held_bytes"] is None for n in neighbours)
            inodes = {s["inode"] for s in found["segments"] + found["neighbours"]}
            assert inodes == {inode for _, _, inode in mappings(pid)}
    finally:
        pool.run(forget)
    shown = info("--pid", str(pool.pids[0])).output
    assert f"process {pool.pids[0]}" in shown
    for other in pool.pids[1:]:
        assert f"of neighbour {other}" in shown


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
def test_what_a_child_shares_with_its_parent(pool: Pool) -> None:
    children = pool.run(fork_sleeper)
    try:
        for parent, child in zip(pool.pids, children, strict=True):
            found = inspect(child)
            assert found.segments and {s.owner for s in found.segments} == {parent}
            assert found.neighbours == []
            assert f"shared with its parent {parent}" in info("--pid", str(child)).output
    finally:
        pool.run(end_child, children)


def sleeper() -> int:
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")


def test_a_process_without_segments() -> None:
    pid = sleeper()
    try:
        result = info("--pid", str(pid))
        assert result.exit_code == 1
        assert (
            f"process {pid}" in result.stderr and 'no group of the backend "hbm"' in result.stderr
        )
    finally:
        os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(InspectionError, match=r"has no segment|has just ended"):  # a zombie
        inspect(pid)
    os.waitpid(pid, 0)
    result = info("--pid", str(pid))
    assert result.exit_code == 1
    assert f"there is no process {pid}" in result.stderr


def test_a_process_of_another_user() -> None:
    if os.getuid() != 0:
        first = Path("/proc/1")  # which does not end
        if not first.exists() or first.stat().st_uid == os.getuid():
            pytest.skip("process 1 is this user's, or cannot be seen")
        with pytest.raises(InspectionError, match=r"not permitted .* root"):
            inspect(1)
        return
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            with pytest.raises(InspectionError, match=r"not permitted .* root"):
                inspect(os.getppid())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


SMAPS = """\
10000000-50000000 rw-s 00000000 00:01 77                      /memfd:hbmcomm-bind (deleted)
Rss:                6144 kB
ShmemPmdMapped:     2048 kB
VmFlags: rd wr sh
50000000-60000000 rw-s 40000000 00:01 77                      /memfd:hbmcomm-bind (deleted)
Rss:                1024 kB
70000000-70100000 rw-p 00000000 00:00 0
Rss:                1024 kB
"""
NUMA_MAPS = """\
10000000 bind:4-5 file=/memfd:hbmcomm-bind\\040(deleted) dirty=1536 N4=1024 N5=512 kernelpagesize_kB=4
50000000 bind:4-5 file=/memfd:hbmcomm-bind\\040(deleted) dirty=256 N4=256 kernelpagesize_kB=4
70000000 prefer (many):4-5 anon=256 dirty=256 N4=256 kernelpagesize_kB=4
70200000 default anon=9 dirty=9 N0=9 kernelpagesize_kB=4
70300000 default file=/usr/lib/libc.so.6 mapped=9 N0=9 kernelpagesize_kB=4
"""  # noqa: E501


def test_nodes_pages_and_placement(tmp_path: Path) -> None:
    """As a machine with HBM tells them; private memory is told from segments."""
    home = tmp_path / "9"
    (home / "fd").mkdir(parents=True)
    (home / "smaps").write_text(SMAPS)
    (home / "numa_maps").write_text(NUMA_MAPS)
    (home / "cmdline").write_bytes(b"python\0train.py\0")
    (home / "environ").write_bytes(b"HOME=/root\0HBMCOMM_MEMORY=bind\0MEMKIND_HBW_NODES=4-5\0")
    found = inspect(9, tmp_path)
    assert found.command == "python train.py"
    assert found.settings == {"HBMCOMM_MEMORY": "bind", "MEMKIND_HBW_NODES": "4-5"}
    assert found.placed == {"prefer (many):4-5": {4: 1 << 20}}
    (segment,) = found.neighbours
    assert (segment.policy, segment.placement, segment.inode) == ("bind", "bind:4-5", 77)
    assert segment.size_bytes == 0x50000000
    assert segment.resident_bytes == 7 << 20 and segment.huge_bytes == 2 << 20
    assert segment.by_node == {4: 5 << 20, 5: 2 << 20}
