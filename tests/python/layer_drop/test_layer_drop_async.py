"""Layer-wise dropping by workers of the asynchronous parameter server: nothing is lost."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from harness.layer_drop_async import (
    NEVER,
    TINY_PIECE,
    TRANSPORTS,
    Layered,
    Weights,
    assert_equal,
    drop,
    in_box,
    total,
    waiting,
)
from harness.pairwise import in_turn
from harness.ps_task import BATCH, INPUTS, accuracy, backward, samples, weights
from harness.ps_workers import Boxes, parameter_server, serving, together
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.layer_drop.decision import DropRule, Shape, layers_of
from torch_hbmcomm.parameter_server import Downpour, layout

pytestmark = pytest.mark.usefixtures("nothing_left")

GRANULARITIES = ["parameter", "module"]

tcp_in_full = pytest.mark.parametrize(
    "transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)]
)


@pytest.fixture(autouse=True)
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", TINY_PIECE)


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
def test_nothing_is_lost(workers: int, count: int) -> None:
    with serving(in_turn(TRANSPORTS, workers, count), count) as boxes:
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
@tcp_in_full
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
@tcp_in_full
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
        self._rules = [DropRule(terms) for _ in range(workers)]
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
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_without_staleness_each_step_is_as_the_references(workers: int, granularity: Any) -> None:
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

    with serving(in_turn(TRANSPORTS, workers // 2, GRANULARITIES.index(granularity))) as boxes:
        assert all(dropped > workers for dropped in together(workers, work))


def test_training_arrives_where_it_does_without_dropping() -> None:
    """And with a fraction of the bytes, in both directions."""
    workers, steps = 3, 200

    def train(terms: hbmcomm.LayerDrop | None) -> tuple[float, float, float, float]:
        def work(worker: int, barrier: threading.Barrier) -> Any:
            model = deep()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
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
        drop(ratio=0.8, every=20, warmup=5, min_numel=200)
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
