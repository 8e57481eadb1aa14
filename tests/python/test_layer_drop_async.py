"""Layer-wise dropping by workers of the asynchronous parameter server.

Workers are threads here, or take turns in one thread. Updates are whole numbers, so that sums are
exact in whatever order they are made.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from box_process import TOKEN, BoxProcess
from ps_task import BATCH, INPUTS, accuracy, backward, network, samples, sgd, weights
from ps_workers import PATIENCE, Boxes, parameter_server, serving, together
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.layer_drop.layers import Shape, layers_of
from torch_hbmcomm.layer_drop.rule import Rule
from torch_hbmcomm.parameter_server import Downpour, Elastic, ParameterServer, layout
from torch_hbmcomm.parameter_server.asynchronous import Asynchronous
from torch_hbmcomm.parameter_server.dropping import layers_in
from torch_hbmcomm.parameter_server.tensors import described, model_tensors
from torch_hbmcomm.parameter_server.versions import Versions

pytestmark = pytest.mark.usefixtures("nothing_left")

SMALL_PIECE = 1 << 8  # bytes: several pieces in each layer
NEVER = 1e9  # a threshold that nothing reaches

Weights = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", SMALL_PIECE)


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def boxes(transport: str) -> Iterator[Boxes]:
    with serving(transport) as served:
        yield served


def drop(**options: Any) -> hbmcomm.LayerDrop:
    return hbmcomm.LayerDrop(**{"min_numel": 16, "max_age": 6, **options})


class Layered(nn.Module):
    """Layers of several sizes and types, and what is always sent."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(31, 11))
        self.norm = nn.BatchNorm1d(5)
        self.first = nn.Linear(13, 7)
        self.second = nn.Linear(7, 9)
        self.exact = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
        self.untrained = nn.Parameter(torch.zeros(6, 6))
        self.frozen = nn.Parameter(torch.zeros(5, 5), requires_grad=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def give(self, name: str, gradient: float) -> None:
        """SGD at a rate of 1 takes it away from each element."""
        parameter = self.get_parameter(name)
        parameter.grad = torch.full_like(parameter, gradient)

    def give_random(self, generator: torch.Generator) -> Weights:
        """Whole numbers, of another size for each layer and step, or none; returns the updates."""
        given = {}
        for name, parameter in self.named_parameters():
            parameter.grad = None
            size = int(torch.randint(0, 40, (), generator=generator))
            if parameter.requires_grad and name != "untrained" and size:
                numbers = torch.randint(-size, size + 1, parameter.shape, generator=generator)
                parameter.grad = numbers.to(parameter.dtype)
                given[name] = -parameter.grad
        return given


def worker_of(ps: ParameterServer) -> Asynchronous:
    """No matter of users."""
    assert isinstance(ps._worker, Asynchronous)
    return ps._worker


def waiting(ps: ParameterServer, model: nn.Module) -> Weights:
    """What a worker's model is ahead of the weights by."""
    worker = worker_of(ps)
    worker._settle()
    ahead = {name: torch.zeros_like(value) for name, value in weights(model).items()}
    for piece, part in worker._replica._parts.items():
        for span in piece.spans:
            name = worker._layout.tensors[span.tensor].name
            if name in ahead:
                at = slice(span.begin, span.begin + span.count)
                base = part.base[span.at : span.at + span.count]
                own = model.get_parameter(name).detach().flatten()[at]
                ahead[name].flatten()[at] = own - base
                if part.rest is not None:
                    ahead[name].flatten()[at] += part.rest[span.at : span.at + span.count]
    return ahead


def total(parts: list[Weights]) -> dict[str, torch.Tensor]:
    result = weights(Layered())
    for part in parts:
        for name, value in part.items():
            result[name] += value
    return result


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{name} differs")


def in_box(boxes: Boxes, **options: Any) -> Weights:
    """The weights, as one finds them who comes late."""
    model = Layered()
    with parameter_server(boxes, model, rule=Downpour("sum"), **options):
        return weights(model)


# -- nothing is lost -----------------------------------------------------------------------------


def train_whole_numbers(boxes: Boxes, workers: int, terms: Any, **options: Any) -> None:
    """The weights and all that waits are the sum of all updates; in the end, the weights alone."""

    def work(worker: int, barrier: threading.Barrier) -> tuple[list[Weights], Weights, Weights]:
        model, delays = Layered(), random.Random(worker)
        generator = torch.Generator().manual_seed(worker)
        settings: dict[str, Any] = {"drop": terms, "workers": workers, **options}
        with parameter_server(boxes, model, rule=Downpour("sum"), **settings) as ps:
            updates = []
            for _ in range(14):
                updates.append(model.give_random(generator))
                time.sleep(delays.random() * 2e-3)
                ps.step()
            ahead = waiting(ps, model)
            barrier.wait()
            found = in_box(boxes, **{**settings, "workers": 1})
            barrier.wait()
            ps.finish()
            stats = ps.stats()
            assert stats["sent_layers"] > 0
            assert stats["dropped_layers"] > 0
            barrier.wait()
            ps.pull()
            assert ps.stats()["pushed_bytes"] == stats["pushed_bytes"]
            return [ahead, *updates], found, weights(model)

    results = together(workers, work)
    expected = total([update for (_, *updates), _, _ in results for update in updates])
    pending = total([ahead for (ahead, *_), _, _ in results])
    for _, found, final in results:
        assert_equal({name: value + pending[name] for name, value in found.items()}, expected)
        assert_equal(final, expected)
    assert boxes.rows() == []


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_lost(transport: str, workers: int, count: int) -> None:
    with serving(transport, count) as boxes:
        train_whole_numbers(boxes, workers, drop(ratio=0.5, every=3))


@pytest.mark.parametrize(
    "terms",
    [
        {"granularity": "module"},
        {"representative": "l1"},
        {"representative": "l2", "target": "paper"},
        {"warmup": 3},
        {"fixed_threshold": 12.0},
        {"min_numel": 0},
    ],
)
def test_nothing_is_lost_with(boxes: Boxes, terms: dict[str, Any]) -> None:
    train_whole_numbers(boxes, 3, drop(**{"ratio": 0.6, "every": 4, **terms}))


@pytest.mark.parametrize(
    "options",
    [
        {"staleness": 0},
        {"staleness": 2},
        {"push_every": 3},
        {"overlap": True},
        {"overlap": True, "staleness": 2},
        {"transfer": torch.bfloat16},
        {"transfer": torch.bfloat16, "overlap": True},
        {"buffers": "local"},
    ],
    ids=str,
)
def test_nothing_is_lost_under(boxes: Boxes, options: dict[str, Any]) -> None:
    train_whole_numbers(boxes, 3, drop(ratio=0.5, every=3), **options)


@pytest.mark.parametrize("leave", ["close", "finish", "pull", "state_dict"])
def test_what_waits_is_sent_at_the_end(boxes: Boxes, leave: str) -> None:
    terms = drop(fixed_threshold=NEVER)
    watched = Layered()
    options: dict[str, Any] = {"rule": Downpour("sum"), "drop": terms}
    with parameter_server(boxes, watched, **options) as watcher:
        model = Layered()
        with parameter_server(boxes, model, **options) as ps:
            update = model.give_random(torch.Generator().manual_seed(0))
            ps.step()
            getattr(ps, leave)()
        watcher.pull()
    assert_equal(weights(watched), total([update]))


# -- both directions -----------------------------------------------------------------------------


class Pair:
    """Two workers that take turns in one thread, and what each of them moved."""

    def __init__(self, first: ParameterServer, second: ParameterServer, layers: int) -> None:
        self._counters = 8 * layers
        self._servers = first, second

    def moved(self, worker: int) -> tuple[int, int]:
        """Bytes that a step of this worker pushes and pulls, but for the versions."""
        ps = self._servers[worker]
        before = ps.stats()
        ps.step()
        after = ps.stats()
        pushed = int(after["pushed_bytes"] - before["pushed_bytes"])
        pulled = int(after["pulled_bytes"] - before["pulled_bytes"])
        return pushed - self._counters * (pushed > 0), pulled - self._counters


def test_only_what_changed_travels(boxes: Boxes) -> None:
    terms = drop(fixed_threshold=5.0)
    one, other = Layered(), Layered()
    options: dict[str, Any] = {"rule": Downpour("sum"), "drop": terms, "buffers": "local"}
    with (
        parameter_server(boxes, one, **options) as first,
        parameter_server(boxes, other, **options) as second,
    ):
        pair = Pair(first, second, len(layers_of_model(one, terms)))
        for worker in (0, 1, 0, 1):
            assert pair.moved(worker) == (0, 0)  # nothing happened

        one.give("first.weight", -8)
        one.give("second.weight", -2)
        size = one.first.weight.nbytes
        assert pair.moved(0) == (size, size)
        other.give("wide", -3)
        assert pair.moved(1) == (0, size)
        assert other.first.weight.eq(8).all()
        assert other.second.weight.eq(0).all()
        assert one.second.weight.eq(2).all()
        assert other.wide.eq(3).all()
        one.zero_grad()
        other.zero_grad()
        assert pair.moved(1) == (0, 0)
        assert pair.moved(0) == (0, 0)

        one.give("wide", -7)  # the other one has 3 of its own waiting
        size = one.wide.nbytes
        assert pair.moved(0) == (size, size)
        assert pair.moved(1) == (0, size)
        assert other.wide.eq(10).all()
        other.give("wide", -2)
        assert pair.moved(1) == (size, size)  # the 3 and the 2
        assert pair.moved(0)[1] == size
        assert one.wide.eq(19).all()  # with another 7


def layers_of_model(model: nn.Module, terms: hbmcomm.LayerDrop) -> list[tuple[str, ...]]:
    tensors = [described(*one) for one in model_tensors(model, shared_buffers=False)]
    return [layer.parameters for layer in layers_in(tensors, None, terms)]


def test_small_layers_and_buffers_are_always_sent(boxes: Boxes) -> None:
    terms = drop(fixed_threshold=NEVER)
    one, other = Layered(), Layered()
    with (
        parameter_server(boxes, one, rule=Downpour("sum"), drop=terms) as first,
        parameter_server(boxes, other, rule=Downpour("sum"), drop=terms) as second,
    ):
        for name in ("first.bias", "norm.weight", "wide"):
            one.give(name, -2)
        assert one.norm.running_mean is not None
        one.norm.running_mean += 4
        first.step()
        second.step()
        assert other.norm.running_mean is not None
        assert other.first.bias.eq(2).all()
        assert other.norm.weight.eq(2).all()
        assert other.norm.running_mean.eq(2).all()  # a mean over two
        assert other.wide.eq(0).all()


def test_no_layer_waits_longer_than_its_greatest_age(boxes: Boxes) -> None:
    terms = drop(fixed_threshold=NEVER, max_age=3)
    one, other = Layered(), Layered()
    with (
        parameter_server(boxes, one, rule=Downpour("sum"), drop=terms) as first,
        parameter_server(boxes, other, rule=Downpour("sum"), drop=terms) as second,
    ):
        seen = []
        one.give("wide", -1)
        for _ in range(9):
            first.step()
            second.step()
            seen.append(int(other.wide[0, 0]))
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8]


def test_nothing_is_dropped_at_a_ratio_of_0(boxes: Boxes) -> None:
    model = Layered()
    with parameter_server(boxes, model, rule=Downpour("sum"), drop=drop(ratio=0)) as ps:
        for step in range(4):
            model.give_random(torch.Generator().manual_seed(step))
            ps.step()
            assert all(not ahead.any() for ahead in waiting(ps, model).values())
        assert ps.stats()["dropped_layers"] == 0
        assert ps.stats()["threshold"] == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("representative", ["mean", "l2"])
def test_half_types(boxes: Boxes, dtype: torch.dtype, representative: Any) -> None:
    """A layer of 341 elements: the L2 norm of twos is 37."""
    threshold = 5.0 if representative == "mean" else 80.0
    terms = drop(fixed_threshold=threshold, representative=representative)
    model = Layered().to(dtype)
    with parameter_server(boxes, model, rule=Downpour("sum"), drop=terms) as ps:
        model.give("wide", -2)
        sent = []
        for _ in range(4):
            before = ps.stats()["sent_layers"]
            ps.step()
            sent.append(ps.stats()["sent_layers"] - before)
        assert sent == [0, 0, 1, 0]
        assert waiting(ps, model)["wide"].eq(2).all()
        assert model.wide.eq(8).all()


def test_who_comes_late_has_everything(boxes: Boxes) -> None:
    terms = drop(fixed_threshold=5.0)
    one, late = Layered(), Layered()
    options: dict[str, Any] = {"rule": Downpour("sum"), "drop": terms, "buffers": "local"}
    with parameter_server(boxes, one, **options) as first:
        one.give("wide", -8)
        one.give("exact", -1)
        first.step()
        with parameter_server(boxes, late, **options) as second:
            pair = Pair(first, second, len(layers_of_model(one, terms)))
            assert late.wide.eq(8).all()
            assert late.exact.eq(0).all()
            assert pair.moved(1) == (0, 0)
            first.pull()
            assert pair.moved(1) == (0, one.exact.nbytes)
            assert late.exact.eq(1).all()


# -- against a reference -------------------------------------------------------------------------


class Reference:
    """Lockstep in plain PyTorch: each worker's updates add up until they are sent."""

    def __init__(self, workers: int, terms: hbmcomm.LayerDrop) -> None:
        model = Layered()
        self._weights = weights(model)
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        shapes = [
            Shape(name, one.dim(), one.numel(), one.element_size())
            for name, one in self._weights.items()
            if name in self._trained
        ]
        self._layers = layers_of(shapes, terms)
        self._rules = [Rule(terms) for _ in range(workers)]
        self._cached = [weights(model) for _ in range(workers)]

    def step(self, updates: list[Weights]) -> list[Weights]:
        """Returns the models of all workers after it."""
        for rule, cached, update in zip(self._rules, self._cached, updates, strict=True):
            for name, value in update.items():
                cached[name] += value
            moments = [
                float(sum(cached[name].abs().sum() for name in layer.parameters))
                for layer in self._layers
            ]
            sent = rule.decide(self._layers, moments)
            rule.end_step()
            for layer, goes in zip(self._layers, sent, strict=True):
                for name in layer.parameters if goes else ():
                    self._weights[name] += cached[name]
                    cached[name].zero_()
        return [
            {name: value + cached[name] for name, value in self._weights.items()}
            for cached in self._cached
        ]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("granularity", ["parameter", "module"])
def test_without_staleness_each_step_is_as_the_references(
    boxes: Boxes, workers: int, granularity: Any
) -> None:
    terms = drop(fixed_threshold=30.0, granularity=granularity)
    generators = [torch.Generator().manual_seed(worker) for worker in range(workers)]
    updates = [[Layered().give_random(generator) for generator in generators] for _ in range(20)]
    reference = Reference(workers, terms)
    expected = [reference.step(each) for each in updates]

    def work(worker: int, barrier: threading.Barrier) -> int:
        model = Layered()
        options: dict[str, Any] = {"workers": workers, "staleness": 0, "drop": terms}
        with parameter_server(boxes, model, rule=Downpour("sum"), **options) as ps:
            for step, (each, found) in enumerate(zip(updates, expected, strict=True)):
                for name, parameter in model.named_parameters():
                    update = each[worker].get(name)
                    parameter.grad = None if update is None else -update
                ps.step()
                for name, value in found[worker].items():
                    where = f"worker {worker}, step {step}: {name}"
                    assert torch.equal(model.get_parameter(name), value), where
            barrier.wait()  # or the first one's close() would send what waits
            return int(ps.stats()["dropped_layers"])

    assert all(dropped > workers for dropped in together(workers, work))


def test_training_arrives_where_it_does_without_dropping() -> None:
    """And with a fraction of the bytes, in both directions."""
    workers, steps = 3, 400

    def train(terms: hbmcomm.LayerDrop | None) -> tuple[float, float, float, float]:
        def work(worker: int, barrier: threading.Barrier) -> Any:
            model = deep()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options: dict[str, Any] = {"workers": workers, "staleness": 0, "drop": terms}
            with parameter_server(served, model, optimizer, **options) as ps:
                for step in range(steps):
                    backward(model, step, worker, workers)
                    ps.step()
                barrier.wait()
                stats = ps.stats()
                ps.pull()
                barrier.wait()
                ps.pull()
                inputs, classes = samples(steps, 40 * BATCH)
                loss = float(nn.functional.cross_entropy(model(inputs), classes).detach())
                return loss, accuracy(model), stats["pushed_bytes"], stats["pulled_bytes"]

        with serving("shm") as served:
            results = together(workers, work)
        assert len({loss for loss, *_ in results}) == 1
        found: tuple[float, float, float, float] = results[0]
        return found

    loss, correct, pushed, pulled = train(None)
    dropped_loss, dropped_correct, fewer_pushed, fewer_pulled = train(
        drop(ratio=0.8, every=20, warmup=10, min_numel=200)
    )
    assert correct > 0.9
    assert dropped_correct > correct - 0.02
    assert dropped_loss < loss + 0.05
    assert fewer_pushed < 0.35 * pushed
    assert fewer_pulled < 0.75 * pulled  # what any of three sent


def deep() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [module for _ in range(4) for module in (nn.Linear(24, 24), nn.Tanh())]
        return nn.Sequential(nn.Linear(INPUTS, 24), nn.Tanh(), *layers, nn.Linear(24, 3))


# -- what dies -----------------------------------------------------------------------------------


def test_nothing_is_lost_though_the_box_is_killed(transport: Any, tmp_path: Path) -> None:
    terms = drop(ratio=0.5, every=3)
    with BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process:
        begun = threading.Event()

        def train(worker: int, barrier: threading.Barrier) -> tuple[list[Weights], Weights]:
            model, generator = Layered(), torch.Generator().manual_seed(worker)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            updates = []
            with (
                smb.connect(process.url, TOKEN, transport=transport) as box,
                ParameterServer(
                    model, optimizer, box=box, rule=Downpour("sum"), workers=2, drop=terms
                ) as ps,
            ):
                for _ in range(40):
                    begun.set()
                    updates.append(model.give_random(generator))
                    ps.step()
                    time.sleep(0.02)
                ps.pull()
                barrier.wait()
                ps.step()  # with the last gradients once more
                updates.append(updates[-1])
                ps.pull()
                barrier.wait()
                ps.pull()
                return updates, weights(model)

        def kill() -> None:
            begun.wait(PATIENCE)
            time.sleep(0.3)
            process.kill()
            process.start()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            results = together(2, train)
        finally:
            killer.join()
    expected = total([update for updates, _ in results for update in updates])
    for _, found in results:
        assert_equal(found, expected)


def test_a_worker_dies_before_it_tells(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had added is seen when the layer is sent next, or by pull()."""
    terms = drop(fixed_threshold=5.0)
    one, other = Layered(), Layered()
    with parameter_server(boxes, other, rule=Downpour("sum"), drop=terms) as ps:
        with (
            pytest.raises(KeyboardInterrupt),
            parameter_server(boxes, one, rule=Downpour("sum"), drop=terms) as dying,
            monkeypatch.context() as patched,
        ):
            patched.setattr(Versions, "bump", Mock(side_effect=KeyboardInterrupt))
            one.give("wide", -8)
            one.give("exact", -7)
            dying.step()
        ps.step()
        assert other.wide.eq(0).all()
        other.give("wide", -10)
        ps.step()
        assert other.wide.eq(18).all()
        assert other.exact.eq(0).all()
        ps.pull()
        assert other.exact.eq(7).all()


# -- errors, and what else there is --------------------------------------------------------------


def test_what_is_not_finite_is_not_sent(boxes: Boxes) -> None:
    """And what waited beside it is given up."""
    terms = drop(fixed_threshold=5.0)
    one, other = Layered(), Layered()
    with (
        parameter_server(boxes, one, rule=Downpour("sum"), drop=terms) as first,
        parameter_server(boxes, other, rule=Downpour("sum"), drop=terms) as second,
    ):
        one.give("wide", -2)
        first.step()
        one.give("first.bias", -9)
        one.give("exact", float("nan"))
        with pytest.warns(RuntimeWarning, match="the update of exact in step 2"):
            first.step()
        assert first.stats()["refused"] == 1
        assert_equal(weights(one), total([]))
        second.step()
        assert_equal(weights(other), total([]))
        one.zero_grad()
        one.give("wide", -6)
        first.step()
        second.step()
        assert other.wide.eq(6).all()


def test_a_rule_of_ones_own(boxes: Boxes) -> None:
    class Clipped(Downpour):
        def __repr__(self) -> str:
            return "Clipped"

        def difference(self, *args: Any) -> None:
            super().difference(*args)
            args[3].clamp_(-7, 7)

    terms = drop(fixed_threshold=6.0)
    model = Layered()
    with parameter_server(boxes, model, rule=Clipped("sum"), drop=terms) as ps:
        model.give("wide", -5)
        ps.step()
        assert model.wide.eq(5).all()
        ps.step()
        assert model.wide.eq(7).all()


def test_the_threshold_is_saved(boxes: Boxes) -> None:
    terms = drop(ratio=0.5, every=2)
    model = Layered()
    with parameter_server(boxes, model, drop=terms) as ps:
        for step in range(5):
            model.give_random(torch.Generator().manual_seed(step))
            ps.step()
        state = ps.state_dict()
        threshold = ps.stats()["threshold"]
        assert threshold > 0
    with parameter_server(boxes, Layered(), drop=terms) as ps:
        ps.load_state_dict(state)
        assert ps.stats()["threshold"] == threshold
    with parameter_server(boxes, Layered()) as ps:
        ps.load_state_dict(state)
        assert "threshold" not in ps.stats()
        state = ps.state_dict()
    with parameter_server(boxes, Layered(), drop=terms) as ps:
        ps.load_state_dict(state)
        assert ps.stats()["threshold"] == -1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rule": "easgd"}, ValueError, r"drop does not go with rule Elastic\(alpha=None\)"),
        ({"rule": Elastic(0.5)}, ValueError, "nothing would add up"),
        ({"drop": drop(cache_dtype=torch.bfloat16)}, ValueError, "cache_dtype=torch.bfloat16"),
        ({"drop": 0.9}, TypeError, "drop is a LayerDrop or None, not 0.9"),
    ],
)
def test_what_does_not_go_together(
    boxes: Boxes, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with (
        pytest.raises(error, match=text),
        parameter_server(boxes, Layered(), **{"drop": drop(), **options}),
    ):
        pass
    assert boxes.rows() == []


@pytest.mark.parametrize("theirs", [None, drop(ratio=0.8)])
def test_all_workers_choose_the_same(boxes: Boxes, theirs: hbmcomm.LayerDrop | None) -> None:
    with (
        parameter_server(boxes, Layered(), drop=drop(ratio=0.9)),
        pytest.raises(ValueError, match=r"drop is .* here, and LayerDrop\(ratio=0.9.* there"),
        parameter_server(boxes, Layered(), drop=theirs),
    ):
        pass


# -- the layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "count"), [("parameter", 6), ("module", 4)])
def test_layers_share_no_piece(granularity: Any, count: int) -> None:
    tensors = [described(*one) for one in model_tensors(Layered(), shared_buffers=True)]
    layers = layers_in(tensors, "bfloat16", drop(granularity=granularity))
    assert len(layers) == count
    assert [layer.always for layer in layers] == [True] + [False] * (count - 1)
    assert "norm.running_mean" in layers[0].parameters
    found = layout.lay_out(tensors, 2, "bfloat16", [layer.members for layer in layers])
    for index, layer in enumerate(layers):
        pieces = [piece for piece in found.changing if piece.layer == index]
        spans = [span for piece in pieces for span in piece.spans]
        assert {span.tensor for span in spans} == set(layer.members)
        assert sum(span.count for span in spans) == layer.numel
        assert sum(piece.slot_size for piece in pieces) == layer.nbytes


def test_a_model_of_one_layer(boxes: Boxes) -> None:
    """That is never sent by itself."""
    model = network().second
    terms = drop(fixed_threshold=NEVER, min_numel=0, granularity="module")
    start = weights(model)
    with parameter_server(boxes, model, sgd(model.parameters()), drop=terms) as ps:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        ps.step()
        assert ps.stats()["sent_layers"] == ps.stats()["pushed_bytes"] == 0
    for name, value in start.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value - 0.3)


def test_a_checkpoint_of_another_kind_moves_nothing(boxes: Boxes) -> None:
    model = Layered()
    with parameter_server(boxes, model, name="one", drop=drop(representative="l1")) as ps:
        state = ps.state_dict()
    other = Layered()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    before = weights(other)
    with parameter_server(boxes, other, name="two", drop=drop()) as ps:
        with pytest.raises(ValueError, match='representative="l1", whose threshold means nothing'):
            ps.load_state_dict(state)
        ps.pull()
        for name, value in weights(other).items():
            assert torch.equal(value, before[name]), name
