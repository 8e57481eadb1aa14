"""hbmcomm.profile() and HBMCOMM_PROFILE record the operations of a rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.jobs import Job, run_code

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.profiling import ranks as files

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

KIB = 1024


def loaded(folder: Path) -> list[files.RankProfile]:
    profiles, earlier = files.load(folder)
    assert earlier == []
    return profiles


def all_kinds(context: Context) -> dict[str, Callable[[], Any]]:
    """Return a call for each kind, and the bytes that it records in float32 of 1,000 elements."""
    size, last = context.size, context.size - 1
    one, many = torch.ones(1000), torch.ones(1000 * size)
    root = context.rank == 0
    return {
        "all_reduce": lambda: dist.all_reduce(one.clone()),
        "broadcast": lambda: dist.broadcast(one, last),
        "reduce": lambda: dist.reduce(one.clone(), last),
        "all_gather": lambda: dist.all_gather(list(many.clone().chunk(size)), one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(many.clone(), one),
        "gather": lambda: dist.gather(one, list(many.clone().chunk(size)) if root else None),
        "scatter": lambda: dist.scatter(one.clone(), list(many.chunk(size)) if root else None),
        "reduce_scatter": lambda: dist.reduce_scatter(one.clone(), list(many.chunk(size))),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one.clone(), many),
        "all_to_all": lambda: dist.all_to_all_single(many.clone(), many),
        "barrier": dist.barrier,
    }


def record_all_kinds(context: Context, folder: str) -> None:
    calls = all_kinds(context)
    with hbmcomm.profile(folder):
        for call in calls.values():
            call()
        if context.rank == 0:
            dist.send(torch.ones(10), 1)
        elif context.rank == 1:
            dist.recv(torch.ones(10), 0)
    dist.barrier()  # not recorded


@pytest.mark.ranks(2, 3)
def test_every_operation_is_recorded_once(pool: Pool, ranks: int, tmp_path: Path) -> None:
    pool.run(record_all_kinds, str(tmp_path))
    profiles = loaded(tmp_path)
    assert [one.rank for one in profiles] == list(range(ranks))
    whole = 4000 * ranks
    for profile in profiles:
        root = profile.rank == 0
        expected = {
            "all_reduce": 4000,
            "broadcast": 4000,
            "reduce": 4000,
            "all_gather": whole,
            "all_gather_into_tensor": whole,
            "gather": whole if root else 4000,
            "scatter": whole if root else 4000,
            "reduce_scatter": whole,
            "reduce_scatter_tensor": whole,
            "all_to_all": whole,
            "barrier": 0,
        }
        if profile.rank < 2:
            expected["send" if root else "recv"] = 40
        assert {one.kind: one.size for one in profile.operations} == expected
        assert len(profile.operations) == len(expected)
        for one in profile.operations:
            assert profile.begin <= one.begin <= one.end <= profile.end
            assert one.peer == {"send": 1, "recv": 0}.get(one.kind, -1)
            assert 0 <= one.hidden <= one.transit
            assert one.path == "shm"
            assert one.data == ("none" if one.kind == "barrier" else "staged")
    numbers = [[(one.kind, one.sequence) for one in profile.operations] for profile in profiles]
    collectives = [[one for one in rank if one[1]] for rank in numbers]
    assert all(rank == collectives[0] for rank in collectives)


def record_memory(context: Context, folder: str) -> None:
    ordinary, shared = torch.ones(64 * KIB), hbmcomm.memory.empty((64 * KIB,)).fill_(1)
    first = context.rank == 0
    with hbmcomm.profile(folder):
        dist.all_reduce(ordinary)
        dist.all_reduce(shared)
        dist.all_reduce(shared[:10])
        dist.all_reduce(shared if first else ordinary)
        dist.broadcast(shared if first else ordinary, 0)
        if first:
            dist.send(shared, 1)
            dist.recv(shared, 1)
        else:
            dist.recv(ordinary, 0)
            dist.send(ordinary, 0)


@pytest.mark.ranks(2)
def test_staged_and_zero_copy_are_told_apart(pool: Pool, tmp_path: Path) -> None:
    pool.run(record_memory, str(tmp_path))
    own = ["segment", "ordinary"]
    for profile in loaded(tmp_path):
        place = own[profile.rank]
        assert [(one.place, one.data) for one in profile.operations] == [
            ("ordinary", "staged"),
            ("segment", "zero-copy"),
            ("segment", "staged"),  # too few bytes
            (place, "staged"),  # as not all tensors are in segments
            (place, "zero-copy"),  # rank 1 reads the tensor of rank 0
            (place, "zero-copy"),
            (place, "staged"),
        ]


def record_groups(context: Context, folder: str) -> None:
    groups = [dist.new_group(list(range(context.size))) for _ in range(2)]
    groups.append(dist.new_group([0, 1]))
    with hbmcomm.profile(folder):
        for group in (None, *groups):
            if dist.get_rank(group) >= 0:
                dist.all_reduce(torch.ones(10), group=group)


@pytest.mark.ranks(3)
def test_each_group_has_its_key_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(record_groups, str(tmp_path))
    first, second, third = ([one.group.key for one in each.operations] for each in loaded(tmp_path))
    assert first == second and first[:3] == third
    assert len(set(first)) == 4


def record_asynchronous(context: Context, folder: str) -> None:
    """Compute while a collective is in transit. Rank 0 issues it only after rank 1 has computed."""
    with hbmcomm.profile(folder):
        data = torch.ones(1000)
        if context.rank == 0:
            dist.recv(torch.ones(1), 1)
        work = dist.all_reduce(data, async_op=True)
        if context.rank == 1:
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                pass
            dist.send(torch.ones(1), 0)
        assert work is not None
        work.wait()


@pytest.mark.ranks(2)
def test_computation_hides_what_is_in_transit(pool: Pool, tmp_path: Path) -> None:
    pool.run(record_asynchronous, str(tmp_path))
    first, second = loaded(tmp_path)
    (computing,) = (one for one in second.operations if one.kind == "all_reduce")
    (late,) = (one for one in first.operations if one.kind == "all_reduce")
    assert computing.hidden >= 0.04e9  # of the 0.05 s of processor time
    assert computing.transit >= computing.hidden + computing.waited
    assert late.begin > computing.begin


def record_twice(context: Context, folder: str) -> None:
    with hbmcomm.profile(folder):
        with (
            pytest.raises(RuntimeError, match="records a profile already"),
            hbmcomm.profile(folder + "/other"),
        ):
            pass
        dist.barrier()


@pytest.mark.ranks(2)
def test_a_second_profile_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(record_twice, str(tmp_path))
    assert [[one.kind for one in each.operations] for each in loaded(tmp_path)] == [
        ["barrier"],
        ["barrier"],
    ]
    assert not (tmp_path / "other").exists()


def wait_in_the_next_profile(context: Context, folder: str) -> None:
    with hbmcomm.profile(folder + "/first"):
        work = dist.all_reduce(torch.ones(1000), async_op=True)
    with hbmcomm.profile(folder + "/second"):
        dist.all_reduce(torch.ones(10))
        assert work is not None
        work.wait()


@pytest.mark.ranks(2)
def test_a_work_of_an_earlier_profile_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(wait_in_the_next_profile, str(tmp_path))
    for profile in loaded(tmp_path / "second"):
        (one,) = profile.operations
        assert (one.size, one.waited) == (40, one.transit)


PROGRAM = """
import os, torch, warnings
import torch.distributed as dist
store = "file://" + os.environ["STORE"]  # of no rank, so the ranks may end at any time
dist.init_process_group("hbm", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
dist.all_reduce(torch.ones(10))
dist.barrier()  # so no rank has written its file yet
warnings.filterwarnings("ignore", category=DeprecationWarning)  # a fork of a process with threads
if os.fork() == 0:
    raise SystemExit
os.wait()
file = os.path.join(os.environ["HBMCOMM_PROFILE"], "rank-" + os.environ["RANK"] + ".json")
assert not os.path.exists(file), "a child that ends like its parent writes no file"
dist.destroy_process_group()
"""


def run_program(nodes: list[str], store: Path, **extra: str) -> list[str]:
    jobs = [
        Job(
            [sys.executable, "-c", PROGRAM],
            RANK=str(rank),
            STORE=str(store),
            HBMCOMM_NODE_ID=node,
            **extra,
        )
        for rank, node in enumerate(nodes)
    ]
    finished = [job.finish() for job in jobs]
    assert [one.code for one in finished] == [0] * len(nodes), finished
    return [one.output for one in finished]


@pytest.mark.parametrize("nodes", [["", ""], ["a", "b"]])
def test_a_program_that_is_not_changed_is_recorded(nodes: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "made" / "by" / "hbm"
    assert run_program(nodes, tmp_path / "store", HBMCOMM_PROFILE=str(folder)) == ["", ""]
    assert sorted(file.name for file in folder.iterdir()) == ["rank-0.json", "rank-1.json"]
    together = nodes[0] == nodes[1]
    for profile in loaded(folder):
        one, _ = profile.operations
        assert (one.kind, one.size, one.data) == ("all_reduce", 40, "staged")
        assert one.path == ("shm" if together else "MPI")
        assert one.group.nodes == ((0, 0) if together else (0, 1))
        assert profile.begin == one.begin  # without the imports
        assert profile.lost == profile.unfinished == 0
    assert files.nodes(loaded(folder)) == (1 if together else 2)


CHILDREN = """
import multiprocessing, os, sys, torch
import torch.distributed as dist
def train(rank, store):
    dist.init_process_group("hbm", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
children = [
    multiprocessing.get_context("fork").Process(target=train, args=(rank, sys.argv[1]))
    for rank in range(2)
]
for child in children:
    child.start()
for child in children:
    child.join()
    assert child.exitcode == 0
"""


def test_children_of_multiprocessing_are_recorded(tmp_path: Path) -> None:
    """A child of the start method fork ends by os._exit()."""
    folder = tmp_path / "costs"
    code = f"import sys\nsys.argv[1:] = [{str(tmp_path / 'store')!r}]\n{CHILDREN}"
    finished = run_code(code, HBMCOMM_PROFILE=str(folder))
    assert (finished.code, finished.output) == (0, "")
    assert sorted(file.name for file in folder.iterdir()) == ["rank-0.json", "rank-1.json"]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    for output in run_program(["", ""], tmp_path / "store", HBMCOMM_PROFILE=str(folder)):
        assert f"HBMCOMM_PROFILE={folder}: the profile cannot be written: " in output


ONLY_THE_LATEST = """
import json, sys
import torch
import torch.distributed as dist
import torch_hbmcomm as hbmcomm
store = dist.HashStore()
dist.init_process_group("hbm", store=store, rank=0, world_size=1)
data = torch.ones(1)
with hbmcomm.profile(sys.argv[1]):
    for _ in range(65536 + 100):
        dist.all_reduce(data)
"""


def test_the_latest_operations_are_kept(tmp_path: Path) -> None:
    code = f"import sys\nsys.argv[1:] = [{str(tmp_path)!r}]\n{ONLY_THE_LATEST}"
    assert run_code(code).output == ""
    found = json.loads((tmp_path / "rank-0.json").read_text())
    assert found["lost"] == 100
    assert [one["sequence"] for one in found["operations"]] == list(range(101, 65536 + 101))


def test_a_process_without_a_group_writes_no_file(tmp_path: Path) -> None:
    """A file of its own would take the place of rank 0's."""
    code = f"import torch_hbmcomm as hbmcomm\nwith hbmcomm.profile({str(tmp_path)!r}):\n    pass"
    finished = run_code(code)
    assert (finished.code, finished.output) == (0, "")
    assert list(tmp_path.iterdir()) == []
