"""Layer-wise dropping by asynchronous workers: deaths, refusals, checkpoints and layouts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from harness import seeds
from harness.box_process import TOKEN, BoxProcess
from harness.layer_drop_async import (
    NEVER,
    TINY_SHARD_BYTES,
    Layered,
    Weights,
    assert_equal,
    drop,
    total,
)
from harness.ps_task import network, sgd, weights
from harness.ps_workers import WAIT_SECONDS, Boxes, parameter_server, together

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server import Downpour, Elastic, ParameterServer, layout
from torch_hbmcomm.parameter_server.exchange import LayerVersions
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import model_tensors
from torch_hbmcomm.parameter_server.selection import layers_in

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SHARD_BYTES", TINY_SHARD_BYTES)


def test_nothing_is_lost_though_the_box_is_killed(transport: Any, tmp_path: Path) -> None:
    terms = drop(ratio=0.5, every=3)
    with BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process:
        begun, restarted = threading.Event(), threading.Event()

        def train(worker: int, barrier: threading.Barrier) -> tuple[list[Weights], Weights]:
            model, generator = Layered(), seeds.generator(worker)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            updates = []
            with (
                smb.connect(process.url, TOKEN, transport=transport) as box,
                ParameterServer(
                    model, optimizer, box=box, rule=Downpour("sum"), workers=2, drop=terms
                ) as ps,
            ):
                after = 0  # steps after the restart
                while after < 8:
                    updates.append(model.give_random(generator))
                    ps.step()
                    if len(updates) == 8:
                        begun.set()
                    after += restarted.is_set()
                ps.pull()
                barrier.wait()
                ps.step()  # with the last gradients once more
                updates.append(updates[-1])
                ps.pull()
                barrier.wait()
                ps.pull()
                return updates, weights(model)

        def kill() -> None:
            begun.wait(WAIT_SECONDS)
            process.kill()
            process.start()
            restarted.set()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            results = together(2, train)
        finally:
            killer.join()
    expected = total([update for updates, _ in results for update in updates])
    for _, found in results:
        assert_equal(found, expected)


def test_a_worker_dies_before_it_raises_versions(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers see the dead worker's deltas when the layer is next sent, or after pull()."""
    terms = drop(fixed_threshold=5.0)
    one, other = Layered(), Layered()
    with parameter_server(boxes, other, rule=Downpour("sum"), drop=terms) as ps:
        with (
            pytest.raises(KeyboardInterrupt),
            parameter_server(boxes, one, rule=Downpour("sum"), drop=terms) as dying,
            monkeypatch.context() as patched,
        ):
            patched.setattr(LayerVersions, "bump", Mock(side_effect=KeyboardInterrupt))
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


def test_deltas_that_are_not_finite_are_not_sent(boxes: Boxes) -> None:
    """Check that a worker with such a delta also discards its unsent updates of other layers."""
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
        ({"rule": Elastic(0.5)}, ValueError, "would not add up"),
        ({"drop": drop(cache_dtype=torch.bfloat16)}, ValueError, "cache_dtype=torch.bfloat16"),
        ({"drop": drop(wire_dtype=torch.bfloat16)}, ValueError, "are for layer_drop_hook"),
        ({"drop": drop(skip_update=False)}, ValueError, "are for layer_drop_hook"),
        ({"drop": 0.9}, TypeError, "drop is a LayerDrop or None, not 0.9"),
        ({"drop": hbmcomm.LowRank()}, TypeError, r"drop is a LayerDrop or None, not LowRank\("),
    ],
)
def test_incompatible_arguments_are_refused(
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


@pytest.mark.parametrize(("granularity", "count"), [("parameter", 6), ("module", 4)])
def test_layers_share_no_shard(granularity: Any, count: int) -> None:
    tensors = [TensorSpec.of(*one) for one in model_tensors(Layered(), shared_buffers=True)]
    layers = layers_in(tensors, "bfloat16", drop(granularity=granularity))
    assert len(layers) == count
    assert [layer.always for layer in layers] == [True] + [False] * (count - 1)
    assert "norm.running_mean" in layers[0].parameters
    found = layout.lay_out(tensors, 2, "bfloat16", [layer.members for layer in layers])
    for index, layer in enumerate(layers):
        shards = [shard for shard in found.changing if shard.layer == index]
        spans = [span for shard in shards for span in shard.spans]
        assert {span.tensor for span in spans} == set(layer.members)
        assert sum(span.length for span in spans) == layer.numel
        assert sum(shard.delta_size for shard in shards) == layer.nbytes


def test_a_model_of_one_layer(boxes: Boxes) -> None:
    """The only layer is not sent, because its score does not reach the threshold."""
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
