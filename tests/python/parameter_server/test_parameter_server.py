"""The asynchronous parameter server: the weights in the boxes, and on the workers.

Workers are threads here; test_parameter_server_faults.py has them as processes.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from harness import seeds
from harness.ps_models import Awkward, Cells, assert_equal, summed, whole_gradients
from harness.ps_task import Optimize, alone, assert_near, backward, network, sgd, weights
from harness.ps_workers import (
    WAIT_SECONDS,
    Boxes,
    exchanging,
    parameter_server,
    serving,
    settle,
    together,
    trained,
)

from torch_hbmcomm.parameter_server import Downpour, Elastic, ParameterServer
from torch_hbmcomm.parameter_server.membership import MembershipTable, WorkerState

pytestmark = pytest.mark.usefixtures("nothing_left", "many_shards")


def push_whole_numbers(
    boxes: Boxes, workers: int, steps: int = 8, **options: Any
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return each worker's final model, and the totals of each worker's gradients."""

    def work(worker: int, barrier: threading.Barrier) -> Any:
        model = Awkward()
        delays = seeds.draws(worker)
        generator = seeds.generator(worker)
        totals: dict[str, torch.Tensor] = {}
        with parameter_server(boxes, model, rule=Downpour("sum"), workers=workers, **options) as ps:
            for _ in range(steps):
                for name, gradient in whole_gradients(model, generator).items():
                    totals[name] = totals.get(name, 0) + gradient
                time.sleep(delays.random() * 2e-3)
                ps.step()
            ps.pull()
            barrier.wait()
            ps.pull()
            return weights(model), totals

    found, totals = zip(*together(workers, work), strict=True)
    return list(found), list(totals)


# -- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("count", "overlap"), [(1, False), (2, True)])
def test_every_push_counts_once(transport: str, count: int, workers: int, overlap: bool) -> None:
    with serving(transport, count) as boxes:
        found, totals = push_whole_numbers(boxes, workers, overlap=overlap)
        assert boxes.rows() == []
    expected = summed(totals, weights(Awkward()))
    for one in found:
        assert_equal(one, expected)


@pytest.mark.parametrize(
    "options", [{"staleness": 0}, {"staleness": 2, "overlap": False}, {"push_every": 3}]
)
def test_every_push_counts_once_under(boxes: Boxes, options: dict[str, Any]) -> None:
    found, totals = push_whole_numbers(boxes, 3, **options)
    expected = summed(totals, weights(Awkward()))
    for one in found:
        assert_equal(one, expected)


def test_close_sends_unsent_changes(boxes: Boxes) -> None:
    model = Awkward()
    generator = seeds.generator(0)
    late = Awkward()
    with parameter_server(boxes, late, rule=Downpour("sum")) as watcher:
        with parameter_server(boxes, model, rule=Downpour("sum"), push_every=5) as ps:
            total = whole_gradients(model, generator)
            ps.step()
        watcher.pull()
    assert_equal(weights(late), summed([total], weights(Awkward())))


# -- staleness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "overlap"), [(0, False), (1, False), (3, False), (1, True), (3, True)]
)
def test_no_worker_runs_too_far_ahead(boxes: Boxes, staleness: int, overlap: bool) -> None:
    """Check that a worker begins step k + 1 only after step k - staleness of each live worker."""
    first, steps = 3, 25
    dies, late = 1, first
    begun = [0] * (first + 1)  # the clock at which each joined
    there = [threading.Event() for _ in range(first + 1)]
    in_flight = threading.Event()

    def expect(worker: int, step: int, present: list[int], seen: list[int]) -> None:
        for other in present:
            if not there[other].is_set():
                continue  # the other worker has ended
            clock = begun[other] + seen[other]
            assert clock >= step - staleness, f"worker {worker}, step {step}: {other} at {clock}"

    def work(worker: int, barrier: threading.Barrier) -> None:
        delays = seeds.draws(worker)
        model = Cells(first + 1)
        if worker == late:
            assert in_flight.wait(WAIT_SECONDS)
        with boxes.connected() as connections:
            ps = ParameterServer(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                box=connections,
                rule=Downpour("sum"),
                staleness=staleness,
                overlap=overlap,
                workers=first,
                timeout=WAIT_SECONDS,
            )
            begun[worker] = clock_of(ps)
            earlier = active(ps)
            there[worker].set()
            for step in range(begun[worker], begun[worker] + steps):
                present = [other for other in range(first + 1) if there[other].is_set()]
                expect(worker, step, present, model.seen())
                if worker == dies and step == 10:
                    there[worker].clear()
                    return  # the worker's connection ends without a leave()
                if worker == 0 and step == 3:
                    in_flight.set()
                if worker == 0 and step == 15:
                    wait_for_another(ps, earlier)
                model.add_one(worker)
                time.sleep(delays.random() * 3e-3)
                ps.step()
            there[worker].clear()
            ps.close()

    together(first + 1, work)
    assert begun[late] > 0


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_worker_joins_within_the_bound(
    boxes: Boxes, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joining worker reads the first worker's clock. Then the first worker takes steps. Only
    then does the joining worker write its entry, so the first worker does not see it before."""
    options: dict[str, Any] = {"staleness": staleness, "overlap": False}
    first, write = Cells(2), MembershipTable._write_own

    def take_steps(table: MembershipTable, cell: int, *values: int) -> None:
        if values[:1] == (WorkerState.ACTIVE,):
            monkeypatch.setattr(MembershipTable, "_write_own", write)
            for _ in range(staleness + 1):
                first.add_one(0)
                ps.step()
        write(table, cell, *values)

    with parameter_server(boxes, first, **options) as ps:
        monkeypatch.setattr(MembershipTable, "_write_own", take_steps)
        with parameter_server(boxes, Cells(2), **options) as joined:
            assert clock_of(ps) == staleness + 1
            assert clock_of(ps) - clock_of(joined) <= staleness


def clock_of(ps: ParameterServer) -> int:
    """Return the worker's clock, which users do not see."""
    return exchanging(ps)._exchange.pushed


def active(ps: ParameterServer) -> set[int]:
    """Return the numbers of the active workers."""
    return {entry.index for entry in exchanging(ps)._job.membership.active()}


def wait_for_another(ps: ParameterServer, earlier: set[int]) -> None:
    """Wait until a worker is active that was not. Its constructor need not have returned, because
    it may wait for further pushes of this worker."""
    deadline = time.monotonic() + WAIT_SECONDS
    while active(ps) <= earlier:
        assert time.monotonic() < deadline, "no other worker has become active"
        time.sleep(1e-3)


# -- against training in one process -------------------------------------------------------------


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Make Adam with an eps at which the last bits of gradients do not matter.

    With the usual eps of 1e-8, the last bits of a gradient near 0 could change a step by lr.
    """
    return torch.optim.Adam(parameters, lr=0.01, eps=0.01)


def averaged(optimize: Optimize, workers: int, steps: int) -> dict[str, torch.Tensor]:
    """Train the reference: after each step all models become the mean of the stepped models."""
    models = [network() for _ in range(workers)]
    optimizers = [optimize(model.parameters()) for model in models]
    for step in range(steps):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, step, worker, workers)
            optimizer.step()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([one.detach() for one in same]).mean(0)
                for one in same:
                    one.copy_(mean)
    return weights(models[0])


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_without_staleness_sgd_is_synchronous_training(boxes: Boxes, workers: int) -> None:
    expected = alone(sgd, 12)
    for found in trained(boxes, workers, sgd, 12, staleness=0):
        assert_near(found, expected)


@pytest.mark.parametrize("optimize", [momentum, adam])
def test_without_staleness_updates_are_averaged(boxes: Boxes, optimize: Optimize) -> None:
    expected = averaged(optimize, 3, 8)
    for found in trained(boxes, 3, optimize, 8, staleness=0):
        assert_near(found, expected)


@pytest.mark.parametrize("optimize", [sgd, momentum, adam])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"push_every": 3}])
def test_one_worker_trains_as_alone(
    boxes: Boxes, optimize: Optimize, options: dict[str, Any]
) -> None:
    (found,) = trained(boxes, 1, optimize, 10, **options)
    assert_near(found, alone(optimize, 10))


def test_a_closure_is_called_as_the_optimizer_calls_it(boxes: Boxes) -> None:
    model = network()
    with parameter_server(boxes, model, sgd(model.parameters())) as ps:
        for step in range(5):
            assert ps.step(lambda step=step: backward(model, step)) > 0  # type: ignore[misc]
        ps.pull()
    assert_near(weights(model), alone(sgd, 5))


def test_two_jobs_in_one_box_do_not_meet(boxes: Boxes) -> None:
    names = ["one", "another"]

    def work(worker: int, barrier: threading.Barrier) -> dict[str, torch.Tensor]:
        model = network()
        with parameter_server(boxes, model, sgd(model.parameters()), name=names[worker]) as ps:
            for step in range(5):
                backward(model, step)
                ps.step()
            barrier.wait()
            ps.pull()
            return weights(model)

    expected = alone(sgd, 5)
    for found in together(2, work):
        assert_near(found, expected)


# -- elastic averaging ---------------------------------------------------------------------------


def test_one_elastic_worker_and_its_center(boxes: Boxes) -> None:
    alpha, steps = 0.4, 10
    local, model = network(), network()
    optimizer = momentum(local.parameters())
    center = weights(local)
    options: dict[str, Any] = {"rule": Elastic(alpha), "overlap": False}
    with parameter_server(boxes, model, momentum(model.parameters()), **options) as ps:
        for step in range(steps):
            backward(local, step)
            optimizer.step()
            for name, value in local.named_parameters():
                parameter = value.detach()
                force = (parameter - center[name]) * alpha
                parameter.sub_(force)
                center[name].add_(force)
            backward(model, step)
            ps.step()
            assert_equal(weights(model), weights(local))
        ps.pull()
    assert_equal(weights(model), center)


def test_lockstep_ends_a_pull_when_the_center_has_been_used(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers change the center as soon as a worker has counted its pull."""
    model, set_pulled = Cells(1), MembershipTable.set_pulled
    model.cells.data.fill_(8)

    def change(table: MembershipTable, clock: int) -> None:
        set_pulled(table, clock)
        values = exchanging(ps)._exchange._exchange.values
        values.write((shard, memoryview(bytes(shard.size))) for shard in values.layout.changing)

    with parameter_server(boxes, model, rule=Elastic(0.5), staleness=0) as ps:
        monkeypatch.setattr(MembershipTable, "set_pulled", change)
        model.add_one(0)
        ps.step()
        assert model.cells.tolist() == [8.5]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("staleness", [None, 2])
def test_the_center_moves_by_the_workers_deltas(
    boxes: Boxes, overlap: bool, staleness: int | None
) -> None:
    """The sum of the center and all workers' weights changes only by the workers' own steps."""
    workers, steps = 3, 10

    def work(worker: int, barrier: threading.Barrier) -> Any:
        model = network().double()
        optimizer = sgd(model.parameters())
        moved = {name: torch.zeros_like(value) for name, value in weights(model).items()}
        options: dict[str, Any] = {"rule": "easgd", "overlap": overlap, "staleness": staleness}
        with parameter_server(boxes, model, optimizer, workers=workers, **options) as ps:
            generator = seeds.generator(worker)
            for _ in range(steps):
                for name, parameter in model.named_parameters():
                    parameter.grad = torch.randn(
                        parameter.shape, generator=generator, dtype=torch.float64
                    )
                    moved[name].sub_(parameter.grad, alpha=0.3)  # as sgd() steps
                ps.step()
            mine = weights(model)
            settle(ps)
            barrier.wait()
            ps.pull()
            return moved, mine, weights(model)

    results = together(workers, work)
    start = weights(network().double())
    for name, value in start.items():
        before = (workers + 1) * value + sum(moved[name] for moved, _, _ in results)
        center = results[0][2][name]
        after = center + sum(mine[name] for _, mine, _ in results)
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
        assert not torch.equal(center, value)
