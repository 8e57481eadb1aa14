"""Layer-wise dropping by asynchronous workers: the bytes sent in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.layer_drop_async import (
    NEVER,
    TINY_SHARD_BYTES,
    TRANSPORTS,
    Layered,
    drop,
    waiting,
)
from harness.pairwise import in_turn
from harness.ps_workers import Boxes, parameter_server
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.parameter_server import Downpour, ParameterServer, layout
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import model_tensors
from torch_hbmcomm.parameter_server.selection import layers_in

pytestmark = pytest.mark.usefixtures("nothing_left")

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SHARD_BYTES", TINY_SHARD_BYTES)


class Pair:
    """Two workers that take turns in one thread, and the bytes that each moved."""

    def __init__(self, first: ParameterServer, second: ParameterServer, layers: int) -> None:
        self._counters = 8 * layers
        self._servers = first, second

    def moved(self, worker: int) -> tuple[int, int]:
        """Return the bytes that a step of this worker pushes and pulls, without versions."""
        ps = self._servers[worker]
        before = ps.stats()
        ps.step()
        after = ps.stats()
        pushed = int(after["pushed_bytes"] - before["pushed_bytes"])
        pulled = int(after["pulled_bytes"] - before["pulled_bytes"])
        return pushed - self._counters * (pushed > 0), pulled - self._counters


def test_only_changed_layers_are_sent(boxes: Boxes) -> None:
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

        one.give("wide", -7)  # `other` has an unsent 3 in the same layer
        size = one.wide.nbytes
        assert pair.moved(0) == (size, size)
        assert pair.moved(1) == (0, size)
        assert other.wide.eq(10).all()
        other.give("wide", -2)
        assert pair.moved(1) == (size, size)  # sends the sum of the 3 and the 2
        assert pair.moved(0)[1] == size
        assert one.wide.eq(19).all()  # 7 twice, 3 and 2


def layers_of_model(model: nn.Module, terms: hbmcomm.LayerDrop) -> list[tuple[str, ...]]:
    tensors = [TensorSpec.of(*one) for one in model_tensors(model, shared_buffers=False)]
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


@pytest.mark.parametrize("dtype", HALVES)
def test_half_types(boxes: Boxes, dtype: torch.dtype) -> None:
    """Send the layer in the third step, in which its 341 elements are 6: the L2 norm is 111."""
    measures: list[dict[str, Any]] = [
        {"representative": "mean", "fixed_threshold": 5.0},
        {"representative": "l2", "fixed_threshold": 80.0},
    ]
    terms = drop(**in_turn(measures, HALVES.index(dtype), TRANSPORTS.index(boxes.transport)))
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


def test_a_late_worker_has_everything(boxes: Boxes) -> None:
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
