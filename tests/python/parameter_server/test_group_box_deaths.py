"""The box of Options(parameter_server="auto") outlives rank 0, and ends after the last rank."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, beyond_gloo, seeds
from harness import pool as pools
from harness.box_process import ROOT
from harness.events import await_rank, tell
from harness.group_boxes import SOON, TIMEOUT, await_no_box, box_servers, form
from harness.jobs import BIN, Job
from harness.network import free_port
from harness.ps_models import Cells

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import ParameterServer, group_boxes, smb
from torch_hbmcomm.parameter_server import Downpour

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

RANKS = 3
LEASE = 4.0  # seconds


@pytest.fixture
def mortal_pool(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Yield a bare pool whose ranks may die. All boxes of its groups must end by themselves."""
    monkeypatch.setattr(pools, "GRACE_SECONDS", pools.LIMIT_SECONDS)  # live ranks still train
    pool = Pool(RANKS, bare=True, environment={"HBMCOMM_SOCKET_DIR": str(socket_folder)})
    yield pool
    pool.kill()
    await_no_box(socket_folder)


def run_mortal(pool: Pool, function: Callable[..., Any], *arguments: Any, dead: set[int]) -> None:
    """Run the function on all ranks. The ranks `dead` die, and all others succeed."""
    with pytest.raises(RankFailure) as raised:
        pool.run(function, *arguments)
    assert raised.value.kinds == dict.fromkeys(dead, pools.DIED), raised.value


def form_with_store_on_rank_0(context: Context, port: int, layout: str) -> None:
    """Form a group whose c10d store ends with rank 0. layout: the node of each rank"""
    os.environ["HBMCOMM_NODE_ID"] = layout[context.rank]
    group_boxes._LEASE = LEASE
    dist.init_process_group(
        "hbm",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=TIMEOUT),
        pg_options=hbmcomm.Options(parameter_server="auto"),
    )


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sockets() -> Path:
    return Path(os.environ["HBMCOMM_SOCKET_DIR"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# Rank 0 dies while all train.


def train_until_rank_0_dies(
    context: Context, port: int, layout: str, options: dict[str, Any], results: Path
) -> None:
    steps, doomed = 60, 10
    form_with_store_on_rank_0(context, port, layout)
    (server,) = box_servers(sockets())
    model = Cells(context.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ps = ParameterServer(model, optimizer, rule=Downpour("sum"), **options)
    with open(results / f"{context.rank}.steps", "w", buffering=1) as report:
        for step in itertools.count() if context.rank == 0 else range(steps):
            if context.rank == 0 and step == doomed:
                delay = seeds.generator(context.seed).initial_seed() % 20 / 1000
                threading.Timer(delay, kill_self).start()
            if context.rank > 0 and step == steps // 2:
                until(lambda: os.readlink(f"/proc/{server}/fd/2") == os.devnull)
            model.add_one(context.rank)
            ps.step()
            print("step", file=report)
            time.sleep(0.005)
    ps.finish(wait=True)
    ps.pull()
    state = ps.state_dict()
    ps.close()
    seen = [int(cell) for cell in state["model"]["cells"].tolist()]
    assert seen == model.seen()
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        dist.barrier()
    with pytest.raises(dist.DistBackendError, match=r"box=hbmcomm\.smb\.all_of\(group\)"):
        ParameterServer(model, optimizer, group=dist.group.WORLD)
    with ParameterServer(
        model, optimizer, box=smb.all_of(), name="survivors", workers=context.size - 1
    ) as again:
        assert again.stats()["workers"] <= context.size - 1
        again.finish(wait=True)
    box = smb.of()
    dist.destroy_process_group()
    assert box.closed
    (results / f"{context.rank}.seen").write_text(json.dumps(seen))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("aaa", {}),
        ("aab", {}),
        ("aaa", {"staleness": 0}),
        pytest.param("abb", {"staleness": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_outlives_rank_0(
    mortal_pool: Pool, layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The weights are the sum of all steps of the live ranks and all finished steps of rank 0. The
    step in which rank 0 dies counts or not."""
    port = free_port()
    run_mortal(mortal_pool, train_until_rank_0_dies, port, layout, options, tmp_path, dead={0})
    steps = [(tmp_path / f"{rank}.steps").read_text().count("step\n") for rank in range(RANKS)]
    seen = [json.loads((tmp_path / f"{rank}.seen").read_text()) for rank in range(1, RANKS)]
    assert seen[0] == seen[1]
    first, *others = seen[0]
    assert others == steps[1:]
    assert steps[0] - 1 <= first <= steps[0] + 1  # an exchange may be in flight


@pytest.mark.full
def test_training_under_an_agent_for_each_worker(socket_folder: Path) -> None:
    """The agent of rank 0 ends, and with it the c10d store. The other agents end with 0."""
    agents = 2
    command: list[str | Path] = [
        BIN / "torchrun",
        f"--nnodes={agents}",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    program = ["-m", "harness.ps_group_worker", "30", "10"]
    extra = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'python'}",
        "HBMCOMM_SOCKET_DIR": str(socket_folder),
    }
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Job([*command, f"--node-rank={rank}", *program], **extra))
            for rank in range(agents)
        ]
        first, second = [job.finish(limit=300) for job in jobs]
    assert first.code != 0
    assert second.code == 0, second.output
    assert "rank 1 sees [10, 30]" in second.output, second.output
    await_no_box(socket_folder)


# All ranks die, or rank 0 dies while the group is formed.


def die_together(context: Context) -> None:
    form(context, "auto")
    smb.of().alloc(1 << 20, key="something").write(source=bytes(1 << 20))
    assert len(box_servers(sockets())) == 1
    dist.barrier()
    kill_self()


def test_box_ends_after_the_death_of_all_ranks(mortal_pool: Pool, socket_folder: Path) -> None:
    run_mortal(mortal_pool, die_together, dead=set(range(RANKS)))
    await_no_box(socket_folder)


def die_before_the_others_connect(context: Context, socket_folder: Path) -> None:
    accept = group_boxes.GroupBoxes.accept

    def late(boxes: group_boxes.GroupBoxes, invitation: Any, near: bool) -> None:
        if context.rank == 0:
            kill_self()
        while box_servers(socket_folder):
            time.sleep(0.01)
        accept(boxes, invitation, near)

    group_boxes.GroupBoxes.accept = late  # type: ignore[assignment,method-assign]
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        form(context, "auto")


def test_rank_0_dies_while_the_group_forms(mortal_pool: Pool, socket_folder: Path) -> None:
    run_mortal(mortal_pool, die_before_the_others_connect, socket_folder, dead={0})
    await_no_box(socket_folder)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", r"sys\.executable does not name the program"),
        ("/no/such/python", "No such file or directory"),
        ("/bin/true", "ended before it served the box"),
    ],
)
def test_box_that_does_not_start(mortal_pool: Pool, program: str, said: str) -> None:
    mortal_pool.run(fail_to_start, program, said)


def fail_to_start(context: Context, program: str, said: str) -> None:
    found, sys.executable = sys.executable, program
    with pytest.raises((RuntimeError, OSError), match=said):
        form(context, "auto")
    sys.executable = found
    form(context, "auto", turn=1)
    smb.of().ping()
    dist.destroy_process_group()


# Rank 0 leaves before the others.


def leave_first(context: Context) -> None:
    form(context, "auto")
    cell = smb.of().alloc(8, key="cell")
    dist.barrier()
    if context.rank == 0:
        group_boxes._SILENCE = 0.0
        group = dist.distributed_c10d._get_default_group()
        backend: Any = group._get_backend(torch.device("cpu"))
        backend.resource._timeout = 0.1  # of the wait in destroy_process_group()
        dist.destroy_process_group()
        tell(context, "left")
        os._exit(1)
    await_rank(context, "left", 0)
    cell.fetch_add(0, 1)
    (server,) = box_servers(sockets())
    until(lambda: os.readlink(f"/proc/{server}/fd/2") == os.devnull)
    cell.fetch_add(0, 1)
    dist.destroy_process_group()


def test_box_serves_others_when_rank_0_has_left(mortal_pool: Pool, socket_folder: Path) -> None:
    run_mortal(mortal_pool, leave_first, dead={0})
    await_no_box(socket_folder)


# The box is killed.


def lose_the_box(context: Context, signalled: int) -> None:
    group_boxes._RECONNECT = 0.5
    form(context, "auto")
    (server,) = box_servers(sockets())
    model = Cells(context.size)
    ps = ParameterServer(model, torch.optim.SGD(model.parameters(), lr=1.0), overlap=False)
    ps.step()
    dist.barrier()
    if context.rank == 0:
        os.kill(server, signalled)
    with pytest.raises(smb.BoxUnreachable, match=rf"The group's box is process {server} on "):
        while True:
            model.add_one(context.rank)
            ps.step()
    with pytest.raises(smb.BoxUnreachable):
        ps.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGTERM])
def test_error_names_a_box_that_was_killed(
    mortal_pool: Pool, socket_folder: Path, signalled: int
) -> None:
    mortal_pool.run(lose_the_box, signalled)
    await_no_box(socket_folder)


# The process of the box, and rank 0.


def look_at_the_process(context: Context) -> None:
    tokens = []
    make = secrets.token_hex

    def remembered(size: int) -> str:
        tokens.append(make(size))
        return tokens[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", remembered)
        form(context, "auto")
    (server,) = box_servers(sockets())
    assert os.getsid(server) not in (os.getsid(0), server), "no terminal's signals reach it"
    status = Path(f"/proc/{server}/status").read_text()
    parent = re.search(r"PPid:\s(\d+)", status)
    assert parent is not None and int(parent[1]) != os.getpid(), "no wait for children finds it"
    if context.rank == 0:
        (token,) = tokens
        for name in ("cmdline", "environ"):
            assert token.encode() not in Path(f"/proc/{server}/{name}").read_bytes()
    else:
        assert tokens == []
    dist.barrier()
    dist.destroy_process_group()


def test_process_of_the_box_is_detached(mortal_pool: Pool) -> None:
    mortal_pool.run(look_at_the_process)
