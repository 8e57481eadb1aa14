"""Arguments and models that the asynchronous parameter server refuses, and the errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness.box_process import TOKEN
from harness.ps_models import assert_equal
from harness.ps_task import backward, network, sgd, weights
from harness.ps_workers import Boxes, parameter_server, serving
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server import Downpour, ParameterServer
from torch_hbmcomm.parameter_server.membership import MembershipTable

pytestmark = pytest.mark.usefixtures("nothing_left")


def first_and_second(boxes: Boxes, models: list[nn.Module], options: list[dict[str, Any]]) -> None:
    """Join as a second worker while the first one is active."""
    with (
        parameter_server(boxes, models[0], **options[0]),
        boxes.connected() as connections,
    ):
        before = len(boxes.rows())
        with parameter_server_of(models[1], connections, **options[1]):
            pass
        assert len(boxes.rows()) == before


def parameter_server_of(model: nn.Module, box: Any, **options: Any) -> ParameterServer:
    return ParameterServer(model, sgd(model.parameters()), box=box, timeout=5, **options)


def test_models_that_differ(boxes: Boxes) -> None:
    first, second = network(), network()
    second.second = nn.Linear(40, 4)
    with pytest.raises(ValueError) as raised:
        first_and_second(boxes, [first, second], [{}, {}])
    assert "does not fit the others of 'parameter-server'" in str(raised.value)
    assert "parameter second.weight (float32 [4, 40]" in str(raised.value)
    assert "[3, 40]" in str(raised.value)
    second.second = nn.Linear(40, 3, bias=False)
    with pytest.raises(ValueError, match="3 tensors here, 4 there"):
        first_and_second(boxes, [first, second], [{}, {}])


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"staleness": 2}, {"staleness": 1}, "staleness is 1 here, and 2 there"),
        ({"rule": "downpour"}, {"rule": "easgd"}, "Elastic"),
        ({"rule": Downpour("sum")}, {"rule": "downpour"}, "'mean'"),
    ],
)
def test_terms_that_differ(
    boxes: Boxes, ours: dict[str, Any], theirs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="does not fit the others") as raised:
        first_and_second(boxes, [network(), network()], [ours, theirs])
    assert said in str(raised.value)


def test_a_box_that_fills_while_a_worker_joins(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker needs memory to close the entry of a dead worker."""
    leads = MembershipTable.leads

    def lead_in_a_full_box(table: MembershipTable) -> bool:
        size = 1 << 20
        while size >= 4096:
            try:
                connections[0].alloc(size, temporary=True)
            except MemoryError:
                size //= 2
        return leads(table)

    with boxes.connected() as connections:
        dead = MembershipTable(connections[0], "parameter-server", 5, temporary=True)
        dead._life.delete()
        monkeypatch.setattr(MembershipTable, "leads", lead_in_a_full_box)
        with pytest.raises(MemoryError, match="is too small: it has to hold"):
            parameter_server_of(network(), connections)


def test_a_box_that_is_too_small(transport: Any) -> None:
    model = nn.Linear(1 << 20, 4)
    with serving(transport, memory="16MiB") as boxes, boxes.connected() as connections:
        with pytest.raises(MemoryError) as raised:
            parameter_server_of(model, connections)
        assert "is too small: it has to hold" in str(raised.value)
        assert f"{model.weight.nbytes + 64} bytes for each worker" in str(raised.value)
        assert boxes.rows() == []


def test_a_token_that_is_wrong(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HBMCOMM_TOKEN", "another")
    with pytest.raises(smb.AccessDenied):
        parameter_server_of(network(), boxes.servers[0].url)
    monkeypatch.setenv("HBMCOMM_TOKEN", TOKEN)
    with parameter_server_of(network(), boxes.servers[0].url) as ps:
        ps.step()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staleness": -1}, "staleness is at least 0, not -1"),
        ({"staleness": 0, "overlap": True}, "staleness=0 an exchange cannot overlap"),
        ({"push_every": 0}, "push_every is at least 1"),
        ({"workers": 0}, "workers is at least 1"),
        ({"transfer": torch.float16}, "transfer is None or torch.bfloat16"),
        ({"rule": "upward"}, "rule 'upward' is none of downpour, easgd"),
        ({"buffers": "none"}, "buffers is"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with serving("shm") as boxes, boxes.connected() as connections:
        with pytest.raises(ValueError) as raised:
            parameter_server_of(network(), connections, **options)
        assert said in str(raised.value)
        assert boxes.rows() == []


def test_no_box_and_no_group() -> None:
    with pytest.raises(ValueError, match="there is no process group: give box"):
        parameter_server_of(network(), None)
    with pytest.raises(ValueError, match="box names no box"):
        parameter_server_of(network(), [])


class One(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.odd = nn.Parameter(tensor)


@pytest.mark.parametrize(
    ("tensor", "error", "said"),
    [
        (torch.zeros(3, device="meta"), TypeError, "odd is torch.strided on meta"),
        (torch.zeros(6)[::2], ValueError, "odd of shape [3] has strides [2]"),
        (torch.zeros(1).expand(4), ValueError, "odd of shape [4] has strides [0]"),
        (torch.zeros(3, dtype=torch.complex64), ValueError, "odd (complex64 [3]"),
    ],
)
def test_tensors_that_no_box_can_hold(
    tensor: torch.Tensor, error: type[Exception], said: str
) -> None:
    with serving("shm") as boxes, boxes.connected() as connections:
        with pytest.raises(error) as raised:
            parameter_server_of(One(tensor), connections)
        assert said in str(raised.value)


def test_nothing_to_train() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with (
        serving("shm") as boxes,
        boxes.connected() as connections,
        pytest.raises(ValueError, match="no parameter that requires a gradient"),
    ):
        parameter_server_of(model, connections)


def test_an_optimizer_of_another_model() -> None:
    optimizer = sgd([*network().parameters()])
    with pytest.raises(ValueError, match="a parameter that is not the model's"):
        ParameterServer(network(), optimizer, box="smb://127.0.0.1:1")


@pytest.mark.parametrize(
    ("bad", "rule", "overlap"),
    [
        (float("nan"), "downpour", False),
        (float("nan"), "easgd", True),
        (float("inf"), "downpour", True),
        (float("inf"), "easgd", False),
    ],
)
def test_an_update_that_is_not_finite(boxes: Boxes, bad: float, rule: str, overlap: bool) -> None:
    """After a refused step the weights are as if the worker had called pull() instead."""
    model, other = network(), network()
    options: dict[str, Any] = {"rule": rule, "overlap": overlap, "staleness": 2}
    with (
        parameter_server(boxes, model, sgd(model.parameters()), **options) as ps,
        parameter_server(boxes, other, sgd(other.parameters()), name="other", **options) as without,
    ):
        for step in range(10):
            backward(model, step)
            backward(other, step)
            if step == 4:
                assert model.second.bias.grad is not None
                model.second.bias.grad[1] = bad
                with pytest.warns(RuntimeWarning, match="the update of second.bias in step 5") as w:
                    ps.step()
                assert w[0].filename == __file__
                without.pull()
            else:
                ps.step()
                without.step()
            assert_equal(weights(model), weights(other))
        ps.pull()
        without.pull()
        assert_equal(weights(model), weights(other))
        assert ps.stats()["refused"] == 1
        assert without.stats()["refused"] == 0
        assert ps.stats()["steps"] == 10


def test_large_updates_are_finite(boxes: Boxes) -> None:
    model = One(torch.zeros(100))
    with parameter_server(boxes, model) as ps, warnings.catch_warnings():
        warnings.simplefilter("error")
        model.odd.grad = torch.full((100,), 3e38)  # finite numbers, whose sum is not
        ps.step()
        ps.pull()
    assert model.odd.tolist() == torch.full((100,), -3e38).tolist()


def test_missing_workers_time_out() -> None:
    with (
        serving("shm") as boxes,
        boxes.connected() as connections,
        pytest.raises(TimeoutError, match=r"for 2 workers \(1 have joined\)"),
    ):
        ParameterServer(
            (model := network()), sgd(model.parameters()), box=connections, workers=2, timeout=0.2
        )


def test_a_worker_that_lags_is_named(boxes: Boxes) -> None:
    slow, fast = network(), network()
    options: dict[str, Any] = {"staleness": 1, "overlap": False}
    with (
        parameter_server(boxes, slow, **options),
        parameter_server(boxes, fast, **options, timeout=0.5) as ps,
    ):
        ps.step()
        with pytest.raises(TimeoutError, match=r"exchange 1 of workers 0 \(pid \d+ on "):
            ps.step()
