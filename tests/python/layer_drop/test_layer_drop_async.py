"""Layer-wise dropping by workers of the asynchronous parameter server: nothing is lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from harness import seeds
from harness.layer_drop_async import (
    NEVER,
    TINY_SHARD_BYTES,
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
from harness.ps_task import weights
from harness.ps_workers import Boxes, parameter_server, serving, together

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.error_feedback.layers import Layer
from torch_hbmcomm.layer_drop.decision import DropRule
from torch_hbmcomm.parameter_server import Downpour, layout
from torch_hbmcomm.parameter_server.exchange import COUNTER_BYTES
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import model_tensors
from torch_hbmcomm.parameter_server.selection import layers_in

pytestmark = pytest.mark.usefixtures("nothing_left")

GRANULARITIES = ["parameter", "module"]

tcp_in_full = pytest.mark.parametrize(
    "transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)]
)


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SHARD_BYTES", TINY_SHARD_BYTES)


def train_whole_numbers(boxes: Boxes, workers: int, terms: Any, **options: Any) -> None:
    """Check that weights plus unsent deltas equal all updates, and that final weights do, too."""

    def work(worker: int, barrier: threading.Barrier) -> tuple[list[Weights], Weights, Weights]:
        model, delays = Layered(), seeds.draws(worker)
        # The seed is fixed, so each run drops the same layers: a worker's updates decide which.
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
def test_waiting_layers_are_sent_at_the_end(boxes: Boxes, leave: str) -> None:
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
    """Simulates workers in lockstep: each worker's updates add up until they are sent.

    pushed, pulled: each worker's bytes so far, including the layers' versions
    dropped: the layers that each worker has dropped so far, counted in each step
    """

    def __init__(self, workers: int, terms: hbmcomm.LayerDrop) -> None:
        model = Layered()
        self._weights = weights(model)
        specs = [TensorSpec.of(*one) for one in model_tensors(model, shared_buffers=True)]
        self._layers = layers_in(specs, None, terms)
        self._rules = [DropRule(terms) for _ in range(workers)]
        self._residuals = [weights(model) for _ in range(workers)]
        self.pushed, self.pulled, self.dropped = [0] * workers, [0] * workers, [0] * workers

    def step(self, updates: list[Weights]) -> list[Weights]:
        """Take a step with each worker's update. Return the models of all workers after it."""
        versions = COUNTER_BYTES * len(self._layers)
        changed: set[int] = set()
        for worker, update in enumerate(updates):
            residuals, rule = self._residuals[worker], self._rules[worker]
            for name, value in update.items():
                residuals[name] += value
            layer_sums = [
                float(sum(residuals[name].abs().sum() for name in self._trained(layer)))
                for layer in self._layers
            ]
            flags = rule.decide(self._layers, layer_sums)
            self.dropped[worker] += sum(
                layer_sum != 0 and not goes
                for layer_sum, goes in zip(layer_sums, flags, strict=True)
            )
            sent = {index for index, goes in enumerate(flags) if goes}
            rule.end_step(versions if sent else 0)
            changed |= sent
            self.pushed[worker] += self._bytes(sent) + (versions if sent else 0)
            for index in sent:
                for name in self._trained(self._layers[index]):
                    self._weights[name] += residuals[name]
                    residuals[name].zero_()
        for worker in range(len(updates)):
            self.pulled[worker] += self._bytes(changed) + versions
        return [
            {name: value + residuals[name] for name, value in self._weights.items()}
            for residuals in self._residuals
        ]

    def _trained(self, layer: Layer) -> list[str]:
        return [name for name in layer.parameters if name in self._weights]

    def _bytes(self, layers: set[int]) -> int:
        return sum(self._layers[index].nbytes for index in layers)

    @property
    def all_bytes(self) -> int:
        """Return the bytes of a step in which everything is sent."""
        return sum(layer.nbytes for layer in self._layers)


FIXED: dict[str, Any] = {"fixed_threshold": 30.0}
PAPERS: dict[str, Any] = {"target": "paper", "ratio": 0.5, "every": 4}
BY_BYTES: dict[str, Any] = {"ratio": 0.8, "every": 5, "warmup": 2, "max_age": 20}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("terms", [FIXED, PAPERS, BY_BYTES], ids=["fixed", "paper", "bytes"])
def test_without_staleness_each_step_is_as_the_references(
    workers: int, granularity: Any, terms: dict[str, Any]
) -> None:
    """Compare the models after each step, and at the end the bytes in both directions."""
    dropping = drop(**{**terms, "granularity": granularity})
    generators = [seeds.generator(worker) for worker in range(workers)]
    updates = [[Layered().give_random(generator) for generator in generators] for _ in range(20)]
    reference = Reference(workers, dropping)
    expected = [reference.step(each) for each in updates]

    def work(worker: int, barrier: threading.Barrier) -> dict[str, int | float]:
        model = Layered()
        options: dict[str, Any] = {"workers": workers, "staleness": 0, "drop": dropping}
        with parameter_server(boxes, model, rule=Downpour("sum"), **options) as ps:
            start = ps.stats()
            for step, (each, found) in enumerate(zip(updates, expected, strict=True)):
                for name, parameter in model.named_parameters():
                    update = each[worker].get(name)
                    parameter.grad = None if update is None else -update
                ps.step()
                for name, value in found[worker].items():
                    where = f"worker {worker}, step {step}: {name}"
                    assert torch.equal(model.get_parameter(name), value), where
            end = ps.stats()
            barrier.wait()  # an earlier close() would send waiting layers
            return {name: end[name] - start[name] for name in end}

    transport = in_turn(TRANSPORTS, workers // 2, GRANULARITIES.index(granularity))
    with serving(transport) as boxes:
        moved = together(workers, work)
    assert [one["dropped_layers"] for one in moved] == reference.dropped
    assert [one["pushed_bytes"] for one in moved] == reference.pushed
    assert [one["pulled_bytes"] for one in moved] == reference.pulled


def test_bytes_follow_the_ratio() -> None:
    """The updates have fixed seeds, so that the bytes are the same in every run."""
    workers, steps = 3, 200
    dropping = drop(**BY_BYTES)
    generators = [torch.Generator().manual_seed(worker) for worker in range(workers)]
    reference = Reference(workers, dropping)
    for _ in range(steps):
        reference.step([Layered().give_random(generator) for generator in generators])
    everything = steps * reference.all_bytes
    assert all(pushed < 0.35 * everything for pushed in reference.pushed)
    assert all(pulled < 0.75 * everything for pulled in reference.pulled)  # sent by any of three
