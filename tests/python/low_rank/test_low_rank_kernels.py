"""Gradients of convolution kernels: their matrix has the elements in another order than memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.cases import cases
from harness.hooks import low_rank
from harness.layer_drop_ddp import Weighted, wrapped
from harness.low_rank import backward
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.low_rank.ranks import matrix_of

pytestmark = pytest.mark.ranks(1, 2)

KERNELS = (32, 16, 3, 3)
SEED = 1  # bounds on distances are for these gradients, and not for every possible one


def parameters_in(memory_format: torch.memory_format) -> Weighted:
    """Make a model of 32 x 16 kernels of 3 x 3, whose gradient is a matrix of 96 x 48."""
    model = Weighted(shapes=[KERNELS])
    model.all[0] = torch.nn.Parameter(model.all[0].detach().to(memory_format=memory_format))
    return model


def approximated(
    memory_format: torch.memory_format = torch.contiguous_format, **options: Any
) -> tuple[DistributedDataParallel, hbmcomm.LowRankState]:
    ddp = wrapped(parameters_in(memory_format))
    state = low_rank(ddp, **({"ratio": 0.8} | options))
    return ddp, state


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors, relative to the norm of `expected`."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def held_by_all(state: hbmcomm.LowRankState) -> torch.Tensor:
    residuals = state.state_dict()["caches"]
    total: torch.Tensor = residuals.get("all.0", torch.zeros(KERNELS)).double()
    dist.all_reduce(total)
    return total


def given_and_came(
    context: Context, ddp: DistributedDataParallel, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sums over all ranks and `steps` steps: of the gradients, and of the results."""
    given, came = torch.zeros(2, *KERNELS, dtype=torch.float64)
    for _ in range(steps):
        gradient = torch.randn(KERNELS, generator=context.generator)
        given += gradient
        came += backward(ddp, [gradient])[0].double() * context.size
    dist.all_reduce(given)
    return given, came


def approximate_kernels(context: Context, memory_format: torch.memory_format, options: Any) -> None:
    ddp, state = approximated(memory_format, relaxation=1, **options)
    bound = 1e-4 if not options else 0.02  # bfloat16 has 8 binary digits
    draw = torch.Generator().manual_seed(context.seed)
    for _ in range(3):
        outer, inner = torch.randn(32, 3, generator=draw), torch.randn(16, 3, generator=draw)
        gradient = torch.einsum("oy,ix->oiyx", outer, inner)
        assert distance(backward(ddp, [gradient])[0], gradient) < bound, "of rank 1"
    assert state.summary()["sent_share"] < 0.3
    before = held_by_all(state)
    given, came = given_and_came(context, ddp, 9)
    rest = held_by_all(state)
    assert distance(rest, given) < 1, "something was sent"
    assert distance(came + rest, before + given) < bound, "sent and residual"


@pytest.mark.parametrize(
    ("memory_format", "options"),
    cases(
        {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last},
        {
            "float32": {},
            "bfloat16-cache": {"cache_dtype": torch.bfloat16},
            "bfloat16-wire": {"wire_dtype": torch.bfloat16},
            "bfloat16": {"cache_dtype": torch.bfloat16, "wire_dtype": torch.bfloat16},
        },
        quick=["contiguous-float32", "channels-last-float32", "contiguous-bfloat16"],
    ),
)
def test_memory_order(pool: Pool, memory_format: torch.memory_format, options: Any) -> None:
    pool.run(approximate_kernels, memory_format, options, seed=SEED)


def load_channels_last(context: Context) -> None:
    """Load the state of a model in another memory format."""
    saved: dict[str, Any] = {}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        ddp, state = approximated(memory_format)
        if saved:
            state.load_state_dict(saved)
        before = held_by_all(state)
        given, came = given_and_came(context, ddp, 3)
        assert distance(came + held_by_all(state), before + given) < 1e-4
        saved = state.state_dict()


def test_states_of_another_memory_format(pool: Pool) -> None:
    pool.run(load_channels_last, seed=SEED)


def load_another_split(context: Context) -> None:
    """Load a checkpoint whose kernels were a matrix of 32 x 144.

    The residual and the rank, 26, are loaded. The factors begin again, as they have another shape.
    """
    ddp, state = approximated(ratio=0.5)
    given_and_came(context, ddp, 3)
    saved = state.state_dict()
    earlier = matrix_of("all.0", (32, 144), 4)
    assert earlier is not None and earlier.most == 26
    saved["rule"]["ranks"] = {"all.0": earlier.most}
    saved["rule"]["rights"] = {"all.0": torch.randn(earlier.columns, earlier.most)}
    again, other = approximated(ratio=0.5)
    other.load_state_dict(saved)
    before, counted = held_by_all(other), other.summary()
    given, came = given_and_came(context, again, 100)
    assert distance(came + held_by_all(other), before + given) < 1e-4
    rule = other.state_dict()["rule"]
    assert rule["rights"]["all.0"].shape == (48, rule["ranks"]["all.0"])
    now = other.summary()
    sent = now["sent_bytes"] - counted["sent_bytes"]
    assert sent < 0.55 * (now["gradient_bytes"] - counted["gradient_bytes"])


def test_a_checkpoint_of_an_earlier_split(pool: Pool) -> None:
    pool.run(load_another_split, seed=SEED)
