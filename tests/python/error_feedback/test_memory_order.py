"""The hooks know each gradient's order in memory, and refuse a gradient whose order has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Context, Pool
from harness.asynchronous import two_boxes
from harness.box_process import TOKEN
from harness.data import assert_same
from harness.hooks import hooked
from harness.layer_drop_ddp import wrapped
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
]

# Kernels, kernels of one element, a transposed matrix, and a transposed matrix with gaps.
SHAPES = [(8, 6, 3, 3), (9, 7, 1, 1), (30, 20), (20, 30)]
STEPS = 3


class Layers(nn.Module):
    """A model that returns the weighted sum of its parameters. The weights are the gradients."""

    def __init__(self, *, gaps: bool = True) -> None:
        super().__init__()
        last = torch.zeros(60, 20)[::2].t() if gaps else torch.zeros(20, 30)
        tensors = [torch.zeros(shape) for shape in SHAPES[:2]] + [torch.zeros(20, 30).t(), last]
        self.all = nn.ParameterList(tensors)

    def forward(self, *weights: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.all, weights, strict=True)
        return torch.stack([(one * weight).sum() for one, weight in pairs]).sum()


def gradients(context: Context, rank: int, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(context.seed + 10 * step + rank)
    return [torch.randint(-9, 10, shape, generator=draw) * float(context.size) for shape in SHAPES]


def registered(ddp: Any, box: smb.Box, kind: Any) -> Any:
    if kind == "async":
        state = hbmcomm.AsyncState(None, ddp, box)
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        return state
    options: Any = {"fixed_threshold": 1e30} if kind == "bytes" else {}
    return hooked(ddp, kind, ratio=0.5, min_numel=0, **options)


def keep_orders(context: Context, urls: list[str], kind: str) -> None:
    """Apply each gradient to its own element, whatever order the model had before DDP."""
    for form, options in (
        (torch.channels_last, {}),
        (torch.contiguous_format, {}),
        (torch.channels_last, {"gradient_as_bucket_view": True}),
    ):
        with smb.connect(urls[0], TOKEN) as box:
            model: Any = Layers(gaps=kind != "async")
            model.to(memory_format=form)
            ddp = wrapped(model, broadcast_buffers=False, **options)
            state = registered(ddp, box, kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            expected = [torch.zeros(shape) for shape in SHAPES]
            for step in range(STEPS):
                optimizer.zero_grad()
                ddp(*gradients(context, context.rank, step)).backward()
                optimizer.step()
                for rank in range(context.size):
                    for total, own in zip(expected, gradients(context, rank, step), strict=True):
                        total -= own / context.size
            state.drain(optimizer)
            for index, (found, wanted) in enumerate(zip(model.all, expected, strict=True)):
                if kind == "low_rank":
                    torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=0.1)
                else:
                    assert_same(found.detach(), wanted, f"parameter {index}")
            if kind == "async":
                state.close()


@pytest.mark.parametrize("kind", ["low_rank", "bytes", "async"])
def test_each_element_has_its_own_gradient(pool: Pool, kind: str) -> None:
    with two_boxes() as urls:
        pool.run(keep_orders, urls, kind)


def change_orders(context: Context, urls: list[str]) -> None:
    for kind in ("low_rank", "bytes", "async"):
        for first, then in (
            (torch.contiguous_format, torch.channels_last),
            (torch.channels_last, torch.contiguous_format),
        ):
            with smb.connect(urls[0], TOKEN) as box:
                model: Any = Layers(gaps=False)
                model.to(memory_format=first)
                ddp = wrapped(model, broadcast_buffers=False)
                state = registered(ddp, box, kind)
                optimizer = torch.optim.SGD(model.parameters(), lr=1)
                for step in range(STEPS):
                    optimizer.zero_grad()
                    ddp(*gradients(context, context.rank, step)).backward()
                    optimizer.step()
                before = [parameter.detach().clone() for parameter in model.parameters()]
                saved = state.state_dict()
                model.to(memory_format=then)
                calls: list[Any] = [
                    lambda state=state, optimizer=optimizer: state.drain(optimizer),
                    state.state_dict,
                ]
                if kind != "async":  # AsyncState loads before its first step
                    calls.append(lambda state=state, saved=saved: state.load_state_dict(saved))
                for call in calls:
                    with pytest.raises(ValueError, match=r"all\.0 of shape .* had strides"):
                        call()
                model.to(memory_format=first)
                state.drain(optimizer)  # nothing was lost
                for index, old in enumerate(before):
                    expected = torch.zeros(SHAPES[index])
                    for step in range(STEPS):
                        for rank in range(context.size):
                            expected -= gradients(context, rank, step)[index] / context.size
                    found = model.all[index].detach()
                    bound = 0.1 if kind == "low_rank" else 0.0
                    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
                    assert found.shape == old.shape
                if kind == "async":
                    state.close()


def test_an_order_that_changes_is_refused(pool: Pool) -> None:
    with two_boxes() as urls:
        pool.run(change_orders, urls)


def change_before_backward(context: Context, urls: list[str], kind: str, between: bool) -> None:
    """Change a parameter's order before backward().

    between: True: change it after DDP was made, before the state is made; False: after both
    """
    with smb.connect(urls[0], TOKEN) as box:
        model: Any = Layers(gaps=False)
        ddp = wrapped(model, broadcast_buffers=False)
        if between:
            model.to(memory_format=torch.channels_last)
        state = registered(ddp, box, kind)
        if not between:
            model.all[2].data = model.all[2].data.contiguous()
        complaint = r"all\.0 .* had others when" if between else r"all\.2 .* had strides \[1, 30\]"
        with pytest.raises(ValueError, match=complaint):
            ddp(*gradients(context, context.rank, 0)).backward()
        if kind == "async":
            state.close()


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("kind", ["low_rank", "async"])
def test_an_order_that_changed_before_backward_is_refused(
    fresh_pool: Pool, kind: str, between: bool
) -> None:
    with two_boxes() as urls:
        fresh_pool.run(change_before_backward, urls, kind, between)
