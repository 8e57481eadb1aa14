"""aggregate="node": ranks that die or come late, arguments and calls that differ, lost boxes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, beyond_gloo, seeds
from harness import pool as pools
from harness.box_process import TOKEN
from harness.events import await_rank, tell
from harness.group_boxes import await_no_box, box_servers
from harness.ps_models import Cells
from harness.ps_nodes import WAIT_SECONDS, in_nodes, node_server, settle_all
from torch import nn
from torch._C._distributed_c10d import FileStore

from torch_hbmcomm import ParameterServer, SyncParameterServer, group_boxes, smb
from torch_hbmcomm.parameter_server import Downpour, Elastic

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

LAYOUT = "aabb"
LEASE = 4.0  # seconds


@pytest.fixture
def mortal_pool(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Yield a bare pool whose ranks may die. All boxes of its groups must end by themselves."""
    monkeypatch.setattr(pools, "GRACE_SECONDS", pools.LIMIT_SECONDS)  # live ranks still train
    pool = Pool(len(LAYOUT), bare=True, environment={"HBMCOMM_SOCKET_DIR": str(socket_folder)})
    yield pool
    pool.kill()
    await_no_box(socket_folder)


# -- deaths --------------------------------------------------------------------------------------


def lose_a_rank(context: Context, victim: int, results: Path) -> None:
    """Train until `victim` has died. Write the number of exchanges of the victim's node, or the
    cells that the other node sees at its end."""
    group_boxes._LEASE = LEASE
    in_nodes(context, LAYOUT, _train_until_it_died, victim, results)


def _train_until_it_died(context: Context, victim: int, results: Path) -> None:
    model = Cells(context.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ps = ParameterServer(
        model,
        optimizer,
        rule=Downpour("sum"),
        aggregate="node",
        overlap=False,
        timeout=WAIT_SECONDS,
    )
    if context.rank == victim:
        delay = seeds.generator(context.seed).initial_seed() % 50 / 1000
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    report = results / f"{context.rank}"
    if LAYOUT[context.rank] == LAYOUT[victim]:
        steps = 0
        with pytest.raises(
            dist.DistBackendError,
            match=rf"the node of ranks \[2, 3\] .*rank {victim} \(pid \d+ on \S+\) has died",
        ):
            while True:
                model.add_one(context.rank)
                ps.step()
                steps += 1
        with pytest.raises(RuntimeError, match="step\\(\\) after an error in an exchange"):
            ps.step()
        ps.close()
        report.write_text(str(steps))
        return
    steps = 0
    while steps < 20 or ps.stats()["workers"] > 1:
        model.add_one(context.rank)
        ps.step()
        steps += 1
    settle_all(ps)
    ps.close()
    report.write_text(f"{steps} {model.seen()}")


@pytest.mark.parametrize("victim", [2, 3], ids=["leader", "other-rank"])
def test_a_death_ends_its_node_alone(mortal_pool: Pool, victim: int, tmp_path: Path) -> None:
    """Each exchange of the dead rank's node is in the weights with the changes of both ranks."""
    with pytest.raises(RankFailure) as raised:
        mortal_pool.run(lose_a_rank, victim, tmp_path)
    assert raised.value.kinds == {victim: pools.DIED}, raised.value
    # The survivors may notice the death at different steps, because only the first rank of a node
    # asks the box how many workers live.
    (first_steps, cells), (second_steps, same_cells) = (
        (tmp_path / str(rank)).read_text().split(" ", 1) for rank in (0, 1)
    )
    assert cells == same_cells
    first, second, killed, its_peer = map(int, cells.strip("[]").split(","))
    assert (first, second) == (int(first_steps), int(second_steps))
    exchanges = int((tmp_path / str(5 - victim)).read_text())
    assert killed == its_peer
    assert exchanges <= killed <= exchanges + 1  # an exchange may be in flight


def lose_the_box(context: Context) -> None:
    group_boxes._RECONNECT = 0.5
    in_nodes(context, LAYOUT, _train_without_the_box)


def _train_without_the_box(context: Context) -> None:
    (server,) = box_servers(Path(os.environ["HBMCOMM_SOCKET_DIR"]))
    model = Cells(context.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ps = ParameterServer(model, optimizer, aggregate="node", overlap=False)
    ps.step()
    dist.barrier()
    if context.rank == 0:
        os.kill(server, signal.SIGKILL)
    leader = 2 * (context.rank // 2)
    said = "" if leader == context.rank else f"rank {leader}, which exchanges for the node of "
    with pytest.raises(smb.BoxUnreachable, match=rf"^{said}.*The group's box is process {server} "):
        while True:
            model.add_one(context.rank)
            ps.step()
    if leader == context.rank:
        with pytest.raises(smb.BoxUnreachable):
            ps.close()
    else:
        ps.close()
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_raise_the_error_of_a_lost_box(mortal_pool: Pool) -> None:
    mortal_pool.run(lose_the_box)


# -- a node that comes late ----------------------------------------------------------------------


def join_late(context: Context, url: str) -> list[int]:
    """Train in the first node or in the second, which has a group of its own, and begins once the
    first has exchanged."""
    os.environ["HBMCOMM_TOKEN"] = TOKEN
    node, local = divmod(context.rank, 2)
    if node == 1:
        await_rank(context, "exchanged", 0)
    dist.init_process_group(
        "hbm",
        store=FileStore(str(context.folder / f"store-{node}"), 2),
        rank=local,
        world_size=2,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
    model = Cells(context.size)
    with node_server(model, box=url, name="late") as ps:
        for _ in range(5):
            model.add_one(context.rank)
            ps.step()
        if node == 0:
            ps.pull()
            tell(context, "exchanged")
            while ps.stats()["workers"] < 2:
                model.add_one(context.rank)
                ps.step()
            tell(context, "met")
        else:
            ps.pull()
            assert min(model.seen()[:2]) >= 5
            await_rank(context, "met", 0)
            await_rank(context, "met", 1)
        settle_all(ps)
        seen = model.seen()
        assert seen[context.rank] == ps.stats()["steps"]
    dist.destroy_process_group()
    return seen


def test_a_late_node_takes_the_present_weights() -> None:
    with smb.Server(memory="64MiB", token=TOKEN) as server:
        pool = Pool(len(LAYOUT), bare=True)
        found = pool.run(join_late, server.url)
        assert not any(pool.close())
    assert all(seen == found[0] for seen in found)


# -- arguments and calls that differ -------------------------------------------------------------

DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"aggregate": None}, "aggregate is node here, and None there"),
    ({"staleness": 2}, "staleness is None here, and 2 there"),
    ({"push_every": 2}, "push_every is 1 on rank 0, and 2 on rank 1"),
    ({"overlap": False}, "ranks 0 and 1 of a node do not fit each other: overlap is True"),
    ({"transfer": torch.bfloat16}, "transfer is None on rank 0, and torch.bfloat16 on rank 1"),
    ({"timeout": 5.0}, "timeout is .* on rank 0, and 5.0 on rank 1"),
]
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"aggregate": "host"}, ValueError, "aggregate is None or \"node\", not 'host'"),
    ({"rule": Elastic()}, ValueError, "aggregate does not go with rule Elastic"),
]
"""Arguments on rank 1 alone."""


def make(context: Context, **options: Any) -> ParameterServer:
    model = Cells(context.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chosen: dict[str, Any] = {"rule": Downpour("sum"), "aggregate": "node"}
    return ParameterServer(model, optimizer, **{**chosen, "timeout": WAIT_SECONDS, **options})


def differ(context: Context) -> None:
    own = context.rank == 1
    for different, said in DIFFERENT:
        with pytest.raises(ValueError, match=said):
            make(context, **(different if own else {}))
    for bad, error, said in BAD:
        with pytest.raises(error if own else RuntimeError, match=said):
            make(context, **(bad if own else {}))
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match=r"gloo: only groups of \"hbm\" have ParameterServer"):
        make(context, group=gloo, box="smb://127.0.0.1:1")
    with pytest.raises(TypeError, match="aggregate"):
        SyncParameterServer(nn.Linear(1, 1), None, aggregate="node")  # type: ignore[call-arg]
    make(context).close()


def call_differently(context: Context) -> None:
    """Make other calls than the node's other rank. Both raise, and continue."""
    model = Cells(context.size)
    node, local = divmod(context.rank, 2)
    said = rf"step\(\) by ranks \[{2 * node}\]; pull\(\) by ranks \[{2 * node + 1}\]"
    with node_server(model) as ps:
        model.add_one(context.rank)
        with pytest.raises(RuntimeError, match=f"disagree on the call: {said}"):
            (ps.pull if local else ps.step)()
        if local:
            model.more = nn.Parameter(torch.zeros(1))
            with pytest.raises(RuntimeError, match="parameter more is new"):
                ps.pull()
            del model.more
        else:
            said = rf"rank {context.rank + 1} of the node cannot take part in pull\(\): "
            with pytest.raises(RuntimeError, match=f"{said}RuntimeError: parameter more is new"):
                ps.pull()
            model.cells.grad = None  # the change of the first step is unsent
        ps.step()
        settle_all(ps)
    assert model.seen() == [1] * context.size


def leave_by_an_error(context: Context) -> None:
    """Raise in one rank's `with` block: its node fails, and the other node continues."""
    model = Cells(context.size)
    said = r"the node of ranks \[2, 3\] is one worker .*rank 3"
    if context.rank == 3:
        with pytest.raises(ZeroDivisionError), node_server(model):
            _ = 1 / 0
    elif context.rank == 2:
        with pytest.raises(dist.DistBackendError, match=said), node_server(model) as ps:
            ps.step()
    else:
        with node_server(model) as ps:
            model.add_one(context.rank)
            ps.step()
            settle_all(ps)
        assert model.seen() == [1, 1, 0, 0]
    dist.barrier()


def test_what_differs_between_ranks_raises_on_all(socket_folder: Path) -> None:
    pool = Pool(len(LAYOUT), bare=True)
    for check in (differ, call_differently, leave_by_an_error):
        pool.run(in_nodes, LAYOUT, check)
    assert not any(pool.close())
