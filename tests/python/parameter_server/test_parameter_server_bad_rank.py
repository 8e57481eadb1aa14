"""One rank alone passes a bad argument to a parameter server: every rank raises its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.group_boxes import form
from harness.ps_models import Cells
from torch import nn

from torch_hbmcomm import LayerDrop, ParameterServer, SyncParameterServer
from torch_hbmcomm.parameter_server import Downpour

pytestmark = [pytest.mark.ranks(2, 3), beyond_gloo]

Bad = tuple[dict[str, Any], type[Exception], str]

BOTH: list[Bad] = [
    ({"buffers": "none"}, ValueError, "buffers is"),
    ({"push_every": "often"}, TypeError, "push_every is a whole number"),
    ({"push_every": 0}, ValueError, "push_every is at least 1, not 0"),
    ({"drop": 3}, TypeError, "drop is a LayerDrop"),
    ({"model": torch.zeros(6)[::2]}, ValueError, "does not fill a range of memory"),
    ({"model": torch.ones(3).to_sparse()}, TypeError, "only dense CPU tensors"),
]
ASYNC: list[Bad] = [
    ({"staleness": -1}, ValueError, "staleness is at least 0, not -1"),
    ({"timeout": "long"}, TypeError, "not supported between"),
    ({"rule": "upward"}, ValueError, "rule 'upward' is none of"),
    ({"drop": LayerDrop(every=0)}, ValueError, "every is at least 1, not 0"),
    ({"optimizer": None}, ValueError, "every worker needs an optimizer"),
    ({"optimizer": torch.optim.SGD([torch.ones(1)])}, ValueError, "is not the model's"),
    ({"model": 3}, AttributeError, "parameters"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, ValueError, "no parameter that requires"),
    ({"model": torch.zeros(3, dtype=torch.complex64)}, ValueError, "a parameter server holds"),
]
SYNC: list[Bad] = [
    ({"server": "first"}, TypeError, "server is a whole number"),
    ({"server": -1}, ValueError, "server=-1 is no rank of the group"),
    ({"drop": LayerDrop(ratio=1)}, ValueError, r"ratio is in \[0, 1\), not 1"),
    ({"drop": LayerDrop(ratio="auto")}, ValueError, r'drop\.ratio="auto" is for layer_drop_hook'),
]
DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"staleness": 2}, "staleness is None here, and 2 there"),
    ({"rule": "downpour"}, "rule is .* here, and .* there"),
    ({"drop": LayerDrop()}, "drop is None here, and .*LayerDrop"),
    ({"model": torch.zeros(9)}, r"\[\d\], strides \[1\]\) here, .*\[9\], strides \[1\]\) there"),
    (
        {"kind": SyncParameterServer},
        "rank 0 of the group makes a ParameterServer, and rank 1 makes a SyncParameterServer",
    ),
]
"""Arguments on one rank, each good in itself."""


def make(context: Context, kind: Any = ParameterServer, **options: Any) -> Any:
    model = options.pop("model", Cells(context.size))
    if isinstance(model, torch.Tensor):
        cells = nn.Module()
        cells.cells = nn.Parameter(model)
        model = cells
    if "optimizer" not in options:
        parameters = model.parameters() if isinstance(model, nn.Module) else [torch.ones(1)]
        options["optimizer"] = torch.optim.SGD(parameters, lr=1.0)
    if kind is ParameterServer:
        options = {"timeout": 20, "rule": Downpour("sum")} | options
    return kind(model, **options)


def refuse(context: Context, kind: type, cases: list[Bad]) -> None:
    """Pass each bad case on one rank, each time on another rank.

    That rank must raise the case's error. The others must raise a RuntimeError with its text and
    that rank's number.
    """
    for number, (bad, error, said) in enumerate(cases):
        alone = number % context.size
        own = context.rank == alone
        with pytest.raises(error if own else RuntimeError, match=said) as raised:
            make(context, kind, **(bad if own else {}))
        assert own or f"rank {alone} of the group cannot take part: " in str(raised.value)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == context.size


def check_async(context: Context) -> None:
    form(context, "auto")
    refuse(context, ParameterServer, BOTH + ASYNC)
    for different, said in DIFFERENT:
        with pytest.raises(ValueError, match=said):
            make(context, **(different if context.rank == 1 else {}))
    model = Cells(context.size)
    with make(context, model=model) as ps:
        model.add_one(context.rank)
        ps.step()
        ps.pull()
        dist.barrier()
        ps.pull()
        assert model.seen() == [1] * context.size
        state = ps.state_dict()
    refuse_each_others_states(context, state)
    dist.destroy_process_group()


def refuse_each_others_states(context: Context, state: dict[str, Any]) -> None:
    """Load `state`, of a ParameterServer, on one rank alone. The errors name both classes."""
    with make(context, SyncParameterServer) as ps:
        own = context.rank == 1
        with pytest.raises(
            ValueError if own else RuntimeError,
            match="the state is of a ParameterServer, and this is a SyncParameterServer",
        ):
            ps.load_state_dict(state if own else ps.state_dict())
        ps.load_state_dict(ps.state_dict())
        other = ps.state_dict()
    with make(context) as ps:
        with pytest.raises(
            ValueError, match="the state is of a SyncParameterServer, and this is a ParameterServer"
        ):
            ps.load_state_dict(other)
        ps.load_state_dict(state)


def check_sync(context: Context) -> None:
    refuse(context, SyncParameterServer, BOTH + SYNC)
    model = Cells(context.size)
    with make(context, SyncParameterServer, model=model) as ps:
        model.add_one(context.rank)
        ps.step()
    assert torch.equal(model.cells.detach(), torch.full((context.size,), 1 / context.size))


def test_asynchronous(bare_pool: Pool) -> None:
    bare_pool.run(check_async)


def test_synchronous(pool: Pool) -> None:
    pool.run(check_sync)
