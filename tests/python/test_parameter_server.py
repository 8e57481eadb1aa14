"""The asynchronous parameter server: what arrives in the boxes, and what workers make of it.

Workers are threads here; test_parameter_server_faults.py has them as processes.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ps_task import Optimize, alone, assert_near, backward, network, sgd, weights
from ps_workers import PATIENCE, Boxes, parameter_server, serving, together
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server import Downpour, Elastic, ParameterServer, layout
from torch_hbmcomm.parameter_server.asynchronous import Asynchronous

pytestmark = pytest.mark.usefixtures("nothing_left")

TRANSPORTS = ["shm", "tcp"]
SMALL_PIECE = 1 << 10  # bytes: many pieces in a small model


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", SMALL_PIECE)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def boxes(transport: str) -> Iterator[Boxes]:
    with serving(transport) as served:
        yield served


class Awkward(nn.Module):
    """A tensor of every kind that a layout could get wrong."""

    count: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.single = nn.Parameter(torch.zeros(()))
        self.prime = nn.Parameter(torch.zeros(97))
        self.matrix = nn.Parameter(torch.zeros(13, 7))
        self.transposed = nn.Parameter(torch.zeros(5, 11).t())
        self.images = nn.Parameter(
            torch.zeros(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        )
        self.one_more = nn.Parameter(torch.zeros(SMALL_PIECE // 4 + 1))
        self.long = nn.Parameter(torch.zeros(3 * SMALL_PIECE + 5))
        self.wide = nn.Parameter(torch.zeros(301, dtype=torch.float64))
        self.brain = nn.Parameter(torch.zeros(43, dtype=torch.bfloat16))
        self.narrow = nn.Parameter(torch.zeros(5, 5, dtype=torch.float16))
        self.tied = self.prime
        self.frozen = nn.Parameter(torch.full((17,), 3.0), requires_grad=False)
        self.idle = nn.Parameter(torch.full((19,), 5.0))
        self.register_buffer("statistic", torch.zeros(3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))


def whole_gradients(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Small whole numbers, so that sums of them are exact in every type."""
    given = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name != "idle":
            numbers = torch.randint(-3, 4, parameter.shape, generator=generator)
            gradient = torch.empty_like(parameter.detach()).copy_(numbers)
            parameter.grad = given[name] = gradient
    return given


def summed(
    totals: list[dict[str, torch.Tensor]], into: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What plain SGD makes of all gradients at a rate of 1."""
    result = {name: value.clone() for name, value in into.items()}
    for total in totals:
        for name, value in total.items():
            result[name] -= value
    return result


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{name} differs")


def push_whole_numbers(
    boxes: Boxes, workers: int, steps: int = 8, **options: Any
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """What each worker found in the end, and the totals of the gradients that each had."""

    def work(worker: int, barrier: threading.Barrier) -> Any:
        model = Awkward()
        delays = random.Random(worker)
        generator = torch.Generator().manual_seed(worker)
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
    for one in found:
        assert_equal(one, summed(totals, weights(Awkward())))


def test_what_is_unsent_is_sent_by_close(boxes: Boxes) -> None:
    model = Awkward()
    generator = torch.Generator().manual_seed(0)
    late = Awkward()
    with parameter_server(boxes, late, rule=Downpour("sum")) as watcher:
        with parameter_server(boxes, model, rule=Downpour("sum"), push_every=5) as ps:
            total = whole_gradients(model, generator)
            ps.step()
        watcher.pull()
    assert_equal(weights(late), summed([total], weights(Awkward())))


# -- staleness -----------------------------------------------------------------------------------


class Cells(nn.Module):
    """Worker i adds 1 to cell i in each step: the weights tell how far everyone is."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(count))

    def add_one(self, worker: int) -> None:
        self.cells.grad = torch.zeros_like(self.cells)
        self.cells.grad[worker] = -1

    def seen(self) -> list[int]:
        return [int(cell) for cell in self.cells.tolist()]


@pytest.mark.parametrize(
    ("staleness", "overlap"), [(0, False), (1, False), (3, False), (1, True), (3, True)]
)
def test_no_worker_runs_too_far_ahead(boxes: Boxes, staleness: int, overlap: bool) -> None:
    """At the start of step k + 1 a worker has step k - staleness of all that are there."""
    first, steps = 3, 25
    dies, late = 1, first
    begun = [0] * (first + 1)  # the clock at which each joined
    there = [threading.Event() for _ in range(first + 1)]

    def expect(worker: int, step: int, present: list[int], seen: list[int]) -> None:
        for other in present:
            if not there[other].is_set():
                continue  # it has gone meanwhile
            clock = begun[other] + seen[other]
            assert clock >= step - staleness, f"worker {worker}, step {step}: {other} at {clock}"

    def work(worker: int, barrier: threading.Barrier) -> None:
        delays = random.Random(worker)
        model = Cells(first + 1)
        if worker == late:
            there[0].wait(PATIENCE)
            time.sleep(0.05)
        with boxes.connected() as connections:
            ps = ParameterServer(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                box=connections,
                rule=Downpour("sum"),
                staleness=staleness,
                overlap=overlap,
                workers=first,
                timeout=PATIENCE,
            )
            begun[worker] = clock_of(ps)
            there[worker].set()
            for step in range(begun[worker], begun[worker] + steps):
                present = [other for other in range(first + 1) if there[other].is_set()]
                expect(worker, step, present, model.seen())
                if worker == dies and step == 10:
                    there[worker].clear()
                    return  # its connection ends, and it takes no leave
                model.add_one(worker)
                time.sleep(delays.random() * 3e-3)
                ps.step()
            there[worker].clear()
            ps.close()

    together(first + 1, work)
    assert begun[late] > 0


def clock_of(ps: ParameterServer) -> int:
    """At which it counts: no matter of users."""
    assert isinstance(ps._worker, Asynchronous)
    return ps._worker._exchange._pushed


# -- against training in one process -------------------------------------------------------------


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def averaged(optimize: Optimize, workers: int, steps: int) -> dict[str, torch.Tensor]:
    """The reference: after each step all models become the mean of what their optimizers made."""
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


def trained(
    boxes: Boxes, workers: int, optimize: Optimize, steps: int, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """The weights on each worker after the last step."""

    def work(worker: int, barrier: threading.Barrier) -> dict[str, torch.Tensor]:
        model = network()
        delays = random.Random(worker)
        optimizer = optimize(model.parameters())
        with parameter_server(boxes, model, optimizer, workers=workers, **options) as ps:
            for step in range(steps):
                backward(model, step, worker, workers)
                time.sleep(delays.random() * 2e-3)
                ps.step()
            barrier.wait()
            ps.pull()
            return weights(model)

    return together(workers, work)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_without_staleness_sgd_is_synchronous_training(boxes: Boxes, workers: int) -> None:
    for found in trained(boxes, workers, sgd, 12, staleness=0):
        assert_near(found, alone(sgd, 12))


@pytest.mark.parametrize("optimize", [momentum, adam])
def test_without_staleness_updates_are_averaged(boxes: Boxes, optimize: Optimize) -> None:
    for found in trained(boxes, 3, optimize, 8, staleness=0):
        assert_near(found, averaged(optimize, 3, 8))


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

    for found in together(2, work):
        assert_near(found, alone(sgd, 5))


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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("staleness", [None, 2])
def test_the_center_gets_what_the_workers_give(
    boxes: Boxes, overlap: bool, staleness: int | None
) -> None:
    """center + all workers moves by nothing but the workers' own steps."""
    workers, steps = 3, 10

    def work(worker: int, barrier: threading.Barrier) -> Any:
        model = network().double()
        optimizer = sgd(model.parameters())
        moved = {name: torch.zeros_like(value) for name, value in weights(model).items()}
        options: dict[str, Any] = {"rule": "easgd", "overlap": overlap, "staleness": staleness}
        with parameter_server(boxes, model, optimizer, workers=workers, **options) as ps:
            generator = torch.Generator().manual_seed(worker)
            for _ in range(steps):
                for name, parameter in model.named_parameters():
                    parameter.grad = torch.randn(
                        parameter.shape, generator=generator, dtype=torch.float64
                    )
                    moved[name].sub_(parameter.grad, alpha=0.3)  # as sgd()
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


# -- what else a model has -----------------------------------------------------------------------


def test_what_is_not_trained_is_handed_out_once(boxes: Boxes) -> None:
    first, second = Awkward(), Awkward()
    with torch.no_grad():
        second.frozen.zero_()
        second.count.zero_()
        second.mask.logical_not_()
    with (
        parameter_server(boxes, first) as one,
        parameter_server(boxes, second) as other,
    ):
        assert second.frozen.tolist() == [3.0] * 17
        assert second.count == 7
        assert second.mask.tolist() == [True, False]
        assert second.tied is second.prime
        second.count.add_(1)  # as BatchNorm does
        for ps in (one, other):
            ps.step()
            ps.pull()
        assert [model.count.item() for model in (first, second)] == [7, 8]
        assert other.state_dict()["model"]["count"] == 8
    assert first.idle.tolist() == [5.0] * 19


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(inputs)
        return found

    @property
    def mean(self) -> list[float]:
        assert self.norm.running_mean is not None
        return [round(value, 3) for value in self.norm.running_mean.tolist()]


@pytest.mark.parametrize("policy", ["shared", "local"])
def test_statistics_of_batches(boxes: Boxes, policy: str) -> None:
    models = [Normed(), Normed()]

    def work(worker: int, barrier: threading.Barrier) -> None:
        model = models[worker]
        options: dict[str, Any] = {"buffers": policy, "workers": 2, "staleness": 0}
        with parameter_server(boxes, model, **options) as ps:
            model(torch.full((8, 4), 10.0 * (worker + 1))).sum().backward()
            ps.step()
            ps.pull()
            assert ps.state_dict()["model"]["norm.num_batches_tracked"] == 1
            barrier.wait()

    together(2, work)
    # BatchNorm's momentum is 0.1: of batches of 10 and 20 it makes 1 and 2.
    expected = [1.5, 1.5] if policy == "shared" else [1.0, 2.0]
    assert [model.mean for model in models] == [[value] * 4 for value in expected]


def test_sparse_gradients_are_the_local_optimizers(boxes: Boxes) -> None:
    """The table's difference travels, whatever the gradient was."""

    def work(worker: int, barrier: threading.Barrier) -> torch.Tensor:
        table = nn.Embedding(50, 8, sparse=True)
        with torch.no_grad():
            table.weight.zero_()
        with parameter_server(boxes, table, rule=Downpour("sum"), workers=2) as ps:
            for row in (worker, 7, 7):
                table.zero_grad()
                table(torch.tensor([row])).sum().backward()
                ps.step()
            ps.pull()
            barrier.wait()
            ps.pull()
            return table.weight.detach().clone()

    expected = torch.zeros(50, 8)
    expected[0], expected[1], expected[7] = -1, -1, -4
    for found in together(2, work):
        assert torch.equal(found, expected)


# -- joining late, leaving, checkpoints ----------------------------------------------------------


def test_whoever_comes_late_takes_the_weights(boxes: Boxes) -> None:
    early, late = network(), network()
    with parameter_server(boxes, early, sgd(early.parameters()), overlap=False) as ps:
        for step in range(3):
            backward(early, step)
            ps.step()
        with torch.no_grad():
            for parameter in late.parameters():
                parameter.fill_(99)
        with parameter_server(boxes, late, sgd(late.parameters())) as other:
            assert_equal(weights(late), weights(early))
            assert ps.stats()["workers"] == other.stats()["workers"] == 2
        assert ps.stats()["workers"] == 1
        backward(early, 3)
        ps.step()
    assert_near(weights(early), alone(sgd, 4))
    assert boxes.rows() == []


def test_close_leaves_nothing_in_a_box_that_stays_connected(boxes: Boxes) -> None:
    with boxes.connected() as connections:
        for _ in range(2):
            model = network()
            ps = ParameterServer(model, sgd(model.parameters()), box=connections)
            backward(model, 0)
            ps.step()
            ps.close()
            ps.close()  # does nothing
            assert boxes.rows() == []


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (3, 2)])
def test_a_checkpoint_of_another_number_of_workers(boxes: Boxes, saving: int, loading: int) -> None:
    def save(worker: int, barrier: threading.Barrier) -> dict[str, Any]:
        model = network()
        options: dict[str, Any] = {"workers": saving, "staleness": 0}
        with parameter_server(boxes, model, sgd(model.parameters()), **options) as ps:
            for step in range(5):
                backward(model, step, worker, saving)
                ps.step()
            barrier.wait()
            return copy.deepcopy(ps.state_dict())

    states = together(saving, save)
    assert [state["steps"] for state in states] == [5] * saving
    plain = network()
    plain.load_state_dict(states[-1]["model"])
    assert_near(weights(plain), alone(sgd, 5))

    def load(worker: int, barrier: threading.Barrier) -> dict[str, torch.Tensor]:
        model = network()
        options: dict[str, Any] = {"workers": loading, "staleness": 0}
        with parameter_server(boxes, model, sgd(model.parameters()), **options) as ps:
            ps.load_state_dict(states[0])
            barrier.wait()
            assert_equal(weights(model), weights(plain))
            for step in range(5, 9):
                backward(model, step, worker, loading)
                ps.step()
            with pytest.raises(RuntimeError, match="once, and before the first step"):
                ps.load_state_dict(states[0])
            assert ps.stats()["steps"] == 9
            barrier.wait()
            return weights(model)

    for found in together(loading, load):
        assert_near(found, alone(sgd, 9))


def test_a_checkpoint_is_the_models_own(boxes: Boxes) -> None:
    model = Awkward()
    with parameter_server(boxes, model) as ps:
        whole_gradients(model, torch.Generator().manual_seed(1))
        ps.step()
        state = ps.state_dict()
    assert state["model"].keys() == model.state_dict().keys()
    other = Awkward()
    other.load_state_dict(state["model"])
    assert_equal(weights(other), weights(model))
    assert other.images.is_contiguous(memory_format=torch.channels_last)


def test_kept_weights_outlive_the_workers(boxes: Boxes) -> None:
    for steps in ([0, 1, 2], [3, 4]):
        model = network()
        with parameter_server(boxes, model, sgd(model.parameters()), keep=True) as ps:
            for step in steps:
                backward(model, step)
                ps.step()
            ps.pull()
    assert_near(weights(model), alone(sgd, 5))
    assert len(boxes.rows()) == 3  # roster, manifest, weights


# -- traffic -------------------------------------------------------------------------------------


def trained_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.parameters() if tensor.requires_grad)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_moves_what_is_trained_and_no_more(overlap: bool) -> None:
    """On the wire; the clocks are the rest."""
    steps, model = 7, Awkward()
    roster = smb.key_of("traffic/roster")

    def moved(boxes: Boxes, what: str, clocks: bool = False) -> int:
        return sum(row[what] for row in boxes.rows() if (row["key"] == roster) == clocks)

    def now(boxes: Boxes) -> list[int]:
        return [
            *(moved(boxes, what) for what in ("written_bytes", "read_bytes", "accumulated_bytes")),
            *(moved(boxes, what, clocks=True) for what in ("written_bytes", "read_bytes")),
        ]

    options: dict[str, Any] = {"name": "traffic", "buffers": "local", "overlap": overlap}
    with serving("tcp") as boxes, parameter_server(boxes, model, **options) as ps:
        ps.step()
        ps.pull()  # what overlaps is done
        counted, before = ps.stats(), now(boxes)
        for _ in range(steps):
            ps.step()
        settle(ps)
        differences = [after - since for after, since in zip(now(boxes), before, strict=True)]
        since = ps.stats()
    expected = steps * trained_bytes(model)
    assert differences[:3] == [expected] * 3
    assert since["pushed_bytes"] - counted["pushed_bytes"] == expected
    assert since["pulled_bytes"] - counted["pulled_bytes"] == expected
    # Two clocks of 8 bytes are told. 8 bytes and a line of 64 for each worker are looked at, and
    # once more when a second has passed.
    assert differences[3] == 16 * steps
    assert 72 * steps <= differences[4] <= 2 * 72 * steps


def settle(ps: ParameterServer) -> None:
    """Until what overlaps is done: no matter of users."""
    assert isinstance(ps._worker, Asynchronous)
    ps._worker._settle()


# -- differences that travel as bfloat16 ---------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_rounding_loses_nothing(boxes: Boxes, workers: int, overlap: bool) -> None:
    """Numbers of 16 bits do not fit bfloat16's 8, but the box has their exact sums in the end."""
    steps = 6

    def work(worker: int, barrier: threading.Barrier) -> Any:
        model = Cells(1000)
        generator = torch.Generator().manual_seed(worker)
        total = torch.zeros(1000)
        options: dict[str, Any] = {
            "transfer": torch.bfloat16,
            "overlap": overlap,
            "workers": workers,
        }
        with parameter_server(boxes, model, rule=Downpour("sum"), **options) as ps:
            for _ in range(steps):
                gradient = torch.randint(0, 1 << 16, (1000,), generator=generator).float()
                total += gradient
                model.cells.grad = gradient
                ps.step()
            ps.pull()
            barrier.wait()
            ps.pull()
            return model.cells.detach().clone(), total

    results = together(workers, work)
    expected = -torch.stack([total for _, total in results]).sum(0)
    for found, _ in results:
        assert torch.equal(found, expected)


def test_half_the_traffic() -> None:
    moved = []
    for transfer in (None, torch.bfloat16):
        model = network()
        options: dict[str, Any] = {"transfer": transfer, "overlap": False}
        with serving("tcp") as boxes, parameter_server(boxes, model, **options) as ps:
            for _ in range(3):
                ps.step()
            stats = ps.stats()
            moved.append((stats["pushed_bytes"], stats["pulled_bytes"]))
    assert [(2 * pushed, 2 * pulled) for pushed, pulled in moved[1:]] == moved[:1]


def test_the_weights_are_as_without_rounding(boxes: Boxes) -> None:
    (found,) = trained(boxes, 1, sgd, 20, transfer=torch.bfloat16)
    for name, value in alone(sgd, 20).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-3, msg=name)


def test_what_bfloat16_cannot_tell_from_0_is_dropped(boxes: Boxes) -> None:
    model = Cells(3)
    with parameter_server(boxes, model, transfer=torch.bfloat16) as ps:
        model.cells.grad = torch.tensor([1e-42, -1.0, 1.0])
        ps.step()
        ps.pull()
    assert model.cells.tolist() == [0.0, 1.0, -1.0]
