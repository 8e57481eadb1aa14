"""One rank alone passes a bad argument to ParameterServer: every rank has its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.group_boxes import form
from harness.ps_models import Cells
from torch import nn

from torch_hbmcomm import LayerDrop, ParameterServer
from torch_hbmcomm.parameter_server import Downpour

pytestmark = [pytest.mark.ranks(2, 3), beyond_gloo]

Bad = tuple[dict[str, Any], type[Exception], str]

BOTH: list[Bad] = [
    ({"buffers": "none"}, ValueError, "buffers is"),
    ({"mode": "neither"}, ValueError, 'mode is "async" or "sync"'),
]
ASYNC: list[Bad] = [
    ({"staleness": -1}, ValueError, "staleness is not negative: -1"),
    ({"push_every": "often"}, TypeError, "push_every is a whole number"),
    ({"timeout": "long"}, TypeError, "not supported between"),
    ({"rule": "upward"}, ValueError, "rule 'upward' is none of"),
    ({"drop": 3}, TypeError, "drop is a LayerDrop"),
    ({"optimizer": None}, ValueError, "every worker has an optimizer"),
    ({"optimizer": torch.optim.SGD([torch.ones(1)])}, ValueError, "is not the model's"),
    ({"model": 3}, AttributeError, "parameters"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, ValueError, "no parameter that requires"),
    ({"model": torch.ones(3).to_sparse()}, TypeError, "only dense CPU tensors"),
    ({"model": torch.zeros(6)[::2]}, ValueError, "does not fill a range of memory"),
    ({"model": torch.zeros(3, dtype=torch.complex64)}, ValueError, "a parameter server holds"),
]
SYNC: list[Bad] = [
    ({"staleness": 1}, ValueError, 'belong to mode="async"'),
    ({"push_every": 0}, ValueError, "push_every=0; it is a number of steps"),
    ({"push_every": "often"}, ValueError, "not supported between"),
    ({"server": "first"}, ValueError, "not supported between"),
    ({"model": torch.zeros(6)[::2]}, ValueError, "does not fill a range of memory"),
]
DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"staleness": 2}, "staleness is None here, and 2 there"),
    ({"rule": "downpour"}, "rule is .* here, and .* there"),
    ({"drop": LayerDrop()}, "drop is None here, and .*LayerDrop"),
    ({"model": torch.zeros(9)}, r"\[\d\], strides \[1\]\) here, .*\[9\], strides \[1\]\) there"),
    ({"mode": "sync", "rule": "downpour"}, 'mode is "async" on rank 0 and "sync" on rank'),
]
"""Arguments of mode="async" on one rank, each good in itself."""


def make(context: Context, **options: Any) -> ParameterServer:
    model = options.pop("model", Cells(context.size))
    if isinstance(model, torch.Tensor):
        cells = nn.Module()
        cells.cells = nn.Parameter(model)
        model = cells
    if "optimizer" not in options:
        parameters = model.parameters() if isinstance(model, nn.Module) else [torch.ones(1)]
        options["optimizer"] = torch.optim.SGD(parameters, lr=1.0)
    return ParameterServer(model, **{"timeout": 20, **options})


def refuse(context: Context, usual: dict[str, Any], cases: list[Bad], told: str) -> None:
    """Raise the bad rank's error on all ranks, in turn on each of them."""
    for number, (bad, error, said) in enumerate(cases):
        alone = number % context.size
        own = context.rank == alone
        with pytest.raises(error if own else (RuntimeError, ValueError), match=said) as raised:
            make(context, **(usual | bad if own else usual))
        assert own or told.format(alone) in str(raised.value)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == context.size


def check_async(context: Context) -> None:
    form(context, "auto")
    refuse(context, {}, BOTH + ASYNC, "rank {} of the group cannot take part: ")
    for different, said in DIFFERENT:
        options = {"rule": Downpour("sum")} | (different if context.rank == 1 else {})
        with pytest.raises(ValueError, match=said):
            make(context, **options)
    model = Cells(context.size)
    with make(context, model=model, rule=Downpour("sum")) as ps:
        model.add_one(context.rank)
        ps.step()
        ps.pull()
        dist.barrier()
        ps.pull()
        assert model.seen() == [1] * context.size
    dist.destroy_process_group()


def check_sync(context: Context) -> None:
    refuse(context, {"mode": "sync"}, BOTH, "rank {} of the group cannot take part: ")
    refuse(context, {"mode": "sync"}, SYNC[:1], "rank {} of the group cannot take part: ")
    refuse(context, {"mode": "sync"}, SYNC[1:], "rank {}: ")
    model = Cells(context.size)
    with make(context, mode="sync", model=model) as ps:
        model.add_one(context.rank)
        ps.step()
    assert torch.equal(model.cells.detach(), torch.full((context.size,), 1 / context.size))


def test_asynchronous(bare_pool: Pool) -> None:
    bare_pool.run(check_async)


def test_synchronous(pool: Pool) -> None:
    pool.run(check_sync)
