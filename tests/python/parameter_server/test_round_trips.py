"""The requests of the asynchronous parameter server: how many it makes, for which bytes, and in
which thread. Over a link with a delay each request that a thread waits for takes a round trip."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from harness.box_requests import Log, Request, kinds, record
from harness.ps_models import Awkward, Cells
from harness.ps_workers import (
    WAIT_SECONDS,
    Boxes,
    exchanging,
    parameter_server,
    serving,
    settle,
)

from torch_hbmcomm import LayerDrop, smb
from torch_hbmcomm.parameter_server import ParameterServer, membership
from torch_hbmcomm.parameter_server.layout import Layout
from torch_hbmcomm.parameter_server.sharding import IN_FLIGHT

pytestmark = pytest.mark.usefixtures("nothing_left", "many_shards")

NAME = "round-trips"
WEIGHTS = smb.key_of(f"{NAME}/weights/0")  # in the first box
DROP = LayerDrop(ratio=0.5, every=1)


@contextmanager
def recorded(
    boxes: Boxes, model: torch.nn.Module, log: Log, **options: Any
) -> Iterator[ParameterServer]:
    """Yield a parameter server whose requests are in the log."""
    with ExitStack() as stack:
        connections = stack.enter_context(boxes.connected())
        for connection in connections:
            record(connection, log)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        settings: dict[str, Any] = {"name": NAME, "timeout": WAIT_SECONDS, **options}
        yield stack.enter_context(ParameterServer(model, optimizer, box=connections, **settings))


def layout_of(ps: ParameterServer) -> Layout:
    return ps._plan.layout


def threads(requests: Sequence[Request]) -> list[str]:
    """Return the names of the threads that made requests."""
    return sorted({one.thread.name for one in requests})


# -- joins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [None, DROP], ids=["all", "drop"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_late_worker_joins_with_a_fixed_number_of_requests(
    count: int, drop: LayerDrop | None
) -> None:
    """The number depends on the shards and boxes, and not on workers that came earlier."""
    with serving("tcp", count) as boxes, recorded(boxes, Awkward(), Log(), drop=drop) as first:
        first.step()
        settle(first)
        shards = len(layout_of(first).shards)
        for _ in range(2):
            log = Log()
            with recorded(boxes, Awkward(), log, drop=drop):
                found = kinds(log.take())
            drops = drop is not None
            assert found == {
                # the table, the life segment, the manifest; weights and deltas of each box; the
                # versions, and the increments that the box adds to them
                "alloc": 3 + 2 * count + 2 * drops,
                # the table 5 times: the claim 2, activate() 2, wait_for_workers() 1; the manifest;
                # the mark of each box; the versions
                "read": 5 + 1 + count + drops + shards,
                "write": 4,  # the life segment; the entry: joining, active, joined
                "fetch_add": 2,  # the number of entries; a fence
            }


def test_the_first_worker_joins_with_a_fixed_number_of_requests() -> None:
    log = Log()
    with serving("tcp") as boxes, recorded(boxes, Awkward(), log) as ps:
        found = kinds(log.take())
        shards = len(layout_of(ps).shards)
    assert found == {
        "alloc": 5,
        # the table 5 times; twice whether the weights have been written; the mark
        "read": 5 + 2 + 1 + shards,
        # the life segment, the entry 3 times; the manifest; the mark, with the weights and in the
        # table
        "write": 4 + 1 + 2 + shards,
        "fetch_add": 3,  # the number of entries; two fences
    }


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transfer", [None, torch.bfloat16], ids=str)
def test_a_join_receives_each_shard_once(overlap: bool, transfer: torch.dtype | None) -> None:
    options: dict[str, Any] = {"overlap": overlap, "transfer": transfer}
    with serving("tcp") as boxes, recorded(boxes, Awkward(), Log(), **options) as first:
        first.step()
        settle(first)
        before = received(boxes)
        log = Log()
        with recorded(boxes, Awkward(), log, **options) as late:
            layout = layout_of(late)
            mark = (layout.weights_bytes[0], 8)
            shards = [(shard.offset, shard.size) for shard in layout.shards]
            reads = [one for one in log.take() if (one.key, one.kind) == (WEIGHTS, "read")]
            assert sorted((one.offset, one.size) for one in reads) == sorted([*shards, mark])
            assert received(boxes) - before == sum(size for _, size in [*shards, mark])


def received(boxes: Boxes) -> int:
    """Return the bytes of weights that the box has sent."""
    (row,) = (row for row in boxes.rows() if row["key"] == WEIGHTS)
    return int(row["read_bytes"])


@pytest.mark.parametrize("transfer", [None, torch.bfloat16], ids=str)
def test_the_step_after_a_join_continues_from_the_received_weights(
    boxes: Boxes, transfer: torch.dtype | None
) -> None:
    """The overlapped step has no fresh weights of an exchange yet."""
    options: dict[str, Any] = {"transfer": transfer, "overlap": True, "name": NAME}
    start, late = Cells(1000), Cells(1000)
    with torch.no_grad():
        start.cells.copy_(torch.arange(1000) / 7)
    expected = start.cells.detach().clone()
    if transfer and boxes.transport == "tcp":
        expected = expected.bfloat16().float()
    with parameter_server(boxes, start, **options), parameter_server(boxes, late, **options) as ps:
        late.cells.grad = torch.zeros(1000)
        ps.step()
        assert torch.equal(late.cells, expected)
        ps.pull()
        ps.step()
        assert torch.equal(late.cells, expected)


def test_eight_shards_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the shards that are written and read when a worker joins, and read by pull()."""
    events: list[Request | None] = []  # requests that begin; None: a wait has ended
    result = smb.Future.result

    def finish(future: smb.Future, timeout: float | None = None) -> Any:
        value = result(future, timeout)
        events.append(None)
        return value

    def most(mark: int) -> dict[str, int]:
        """Return the most shards in flight by kind of request, and forget the events."""
        found: dict[str, int] = {}
        kind, now = "", 0
        for event in events:
            if event is None:
                now -= 1
            elif event.key == WEIGHTS and event.offset < mark:
                now = now + 1 if event.kind == kind else 1
                kind = event.kind
                found[kind] = max(found.get(kind, 0), now)
        events.clear()
        return found

    monkeypatch.setattr(smb.Future, "result", finish)
    with serving("tcp") as boxes, recorded(boxes, Awkward(), Log(before=events.append)) as ps:
        layout = layout_of(ps)
        assert len(layout.changing) > 2 * IN_FLIGHT
        assert most(layout.weights_bytes[0]) == {"write": IN_FLIGHT, "read": IN_FLIGHT}
        ps.pull()
        assert most(layout.weights_bytes[0]) == {"read": IN_FLIGHT}
    assert IN_FLIGHT == 8


def test_no_worker_begins_before_all_have_received_the_weights() -> None:
    """While a worker receives the first weights, it is active, and has not joined."""
    errors: list[str] = []

    def before(request: Request) -> None:
        if errors or (request.kind, request.key, request.offset) != ("read", WEIGHTS, 0):
            return
        errors.append("the other worker has begun")
        with (
            pytest.raises(TimeoutError) as raised,
            parameter_server(boxes, Awkward(), name=NAME, workers=2, timeout=0.3),
        ):
            pass
        errors[0] = str(raised.value)

    with serving("tcp") as boxes, recorded(boxes, Awkward(), Log(before=before)):
        pass
    assert "for 2 workers (1 have joined)" in errors[0]


def test_a_fence_separates_the_received_weights_from_joined(boxes: Boxes) -> None:
    """Over shm both are plain accesses to memory."""
    log = Log()
    with recorded(boxes, Cells(1), log):
        requests = [(one.kind, one.key) for one in log.take()]
    roster = smb.key_of(f"{NAME}/roster")
    joined = len(requests) - 1 - requests[::-1].index(("write", roster))
    received = ("fetch_add", roster) if boxes.transport == "shm" else ("read", WEIGHTS)
    assert requests[joined - 1] == received


@pytest.mark.parametrize("staleness", [None, 2])
def test_a_worker_receives_the_constants_and_then_the_rest_while_it_is_active(
    staleness: int | None,
) -> None:
    """Others wait for an active worker. So it receives what changes within the bound on staleness,
    and no worker waits while the constants arrive."""
    active: dict[int, int] = {}  # when a shard is read, by its offset

    def before(request: Request) -> None:
        if (request.kind, request.key) == ("read", WEIGHTS):
            active[request.offset] = len(exchanging(first)._job.membership.active())

    options: dict[str, Any] = {"staleness": staleness}
    with serving("tcp") as boxes, recorded(boxes, Awkward(), Log(), **options) as first:
        first.step()
        settle(first)
        layout = layout_of(first)
        with recorded(boxes, Awkward(), Log(before=before), **options):
            found = dict(active)
    assert {found[shard.offset] for shard in layout.constants} == {1}
    assert {found[shard.offset] for shard in layout.changing} == {2}


# -- steps ---------------------------------------------------------------------------------------


def test_an_overlapped_step_makes_a_fixed_number_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_IDLE_CHECK_SECONDS", 0.0)
    log = Log()
    with (
        serving("tcp") as boxes,
        recorded(boxes, Awkward(), Log()),
        recorded(boxes, Awkward(), log) as ps,
    ):
        shards = len(layout_of(ps).changing)
        log.take()
        for _ in range(3):
            ps.step()
            settle(ps)
            requests = log.take()
            assert threads(requests) == ["hbm-exchange"]
            assert kinds(requests) == {
                "write": shards + 1,  # the deltas; both clocks
                "accumulate": shards,
                "read": shards + 1,  # the weights; the table
                "exists": 1,  # here in each exchange; else once a second
            }


def test_an_overlapped_exchange_after_many_steps_reads_the_table_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps without an exchange make no request."""
    monkeypatch.setattr(membership, "_IDLE_CHECK_SECONDS", 0.0)
    log = Log()
    with (
        serving("tcp") as boxes,
        recorded(boxes, Awkward(), Log()),
        recorded(boxes, Awkward(), log, push_every=3, overlap=True) as ps,
    ):
        shards = len(layout_of(ps).changing)
        log.take()
        for _ in range(2):
            ps.step()
            ps.step()
            assert log.take() == []
            ps.step()
            settle(ps)
            requests = log.take()
            own = threading.current_thread()
            first = [one for one in requests if one.thread is own]
            assert requests[: len(first)] == first
            assert kinds(first) == {"read": 1, "exists": 1}  # "exists" at most once a second
            assert threads(requests[len(first) :]) == ["hbm-exchange"]
            assert kinds(requests[len(first) :]) == {
                "write": shards + 1,  # the deltas; both clocks
                "accumulate": shards,
                "read": shards,
            }


@pytest.mark.parametrize(
    "options",
    [{}, {"staleness": 2}, {"rule": "easgd"}, {"drop": DROP}, {"transfer": torch.bfloat16}],
    ids=str,
)
def test_an_overlapped_step_makes_no_request_in_the_training_thread(
    boxes: Boxes, options: dict[str, Any]
) -> None:
    log, model = Log(), Cells(3000)
    with recorded(boxes, model, log, overlap=True, **options) as ps:
        log.take()
        for _ in range(3):
            model.add_one(1)
            ps.step()
        settle(ps)
        assert threads(log.take()) == ["hbm-exchange"]


def test_a_step_counts_the_workers_of_the_last_exchange(boxes: Boxes) -> None:
    """A delta is scaled by the same count in the model and in the box."""
    model = Cells(2)
    options: dict[str, Any] = {"name": NAME, "overlap": True}
    with parameter_server(boxes, model, **options) as ps:
        with parameter_server(boxes, Cells(2), **options):
            for expected in (-1.0, -1.5):  # alone when it joined; of two in the first exchange
                model.cells.grad = torch.ones(2)
                ps.step()
                assert model.cells.tolist() == [expected] * 2
                settle(ps)
            assert exchanging(ps).counts() == {"workers": 2, "ahead": 1}
        ps.pull()
        assert model.cells.tolist() == [-1.5] * 2


def test_an_exchange_after_many_steps_counts_the_present_workers(boxes: Boxes) -> None:
    model = Cells(2)
    options: dict[str, Any] = {"name": NAME, "overlap": True, "push_every": 2}
    with parameter_server(boxes, model, **options) as ps:
        model.cells.grad = torch.ones(2)
        ps.step()
        with parameter_server(boxes, Cells(2), **options):
            ps.step()
            assert model.cells.tolist() == [-1.0] * 2  # half of the change
            assert exchanging(ps).counts()["workers"] == 2
        ps.pull()
        assert model.cells.tolist() == [-1.0] * 2
