"""The asynchronous parameter server: untrained tensors of a model, workers that come late and
leave, checkpoints.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from harness import seeds
from harness.ps_models import Awkward, assert_equal, whole_gradients
from harness.ps_task import alone, assert_near, backward, network, sgd, weights
from harness.ps_workers import Boxes, parameter_server, together
from torch import nn

from torch_hbmcomm.parameter_server import Downpour, ParameterServer

pytestmark = pytest.mark.usefixtures("nothing_left", "many_shards")


# -- untrained tensors, buffers, sparse gradients ------------------------------------------------


def test_untrained_tensors_are_handed_out_once(boxes: Boxes) -> None:
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
    # BatchNorm's momentum is 0.1, so batches of 10 and 20 give running means of 1 and 2.
    expected = [1.5, 1.5] if policy == "shared" else [1.0, 2.0]
    assert [model.mean for model in models] == [[value] * 4 for value in expected]


def test_sparse_gradients_are_the_local_optimizers(boxes: Boxes) -> None:
    """Sparse gradients go to the local optimizer. The worker sends the table's delta."""

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


def test_a_late_worker_takes_the_weights(boxes: Boxes) -> None:
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

    expected = alone(sgd, 9)
    for found in together(loading, load):
        assert_near(found, expected)


def test_a_checkpoint_is_the_models_own(boxes: Boxes) -> None:
    model = Awkward()
    with parameter_server(boxes, model) as ps:
        whole_gradients(model, seeds.generator(1))
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
    assert len(boxes.rows()) == 3  # membership, manifest, weights
