"""FSDP2 on the accelerator, compared with FSDP2 over Gloo on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.training import WIDTH, net, sharded, train, whole
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

pytestmark = [beyond_gloo, pytest.mark.ranks(2)]

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def odd_net() -> nn.Module:
    """Make a model whose parameters do not divide evenly by the ranks; some have a single row."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 1), nn.Linear(1, WIDTH))


def trained(
    context: Context,
    group: dist.ProcessGroup,
    model: nn.Module,
    device: str,
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """Train over a group. The options `allocate` and `divide_factor` select calls of FSDPModule;
    the others are arguments of fully_shard."""
    options = dict(options)
    allocate = options.pop("allocate", False) and group is not context.gloo
    factor = options.pop("divide_factor", None)
    model = sharded(group, model.to(device), device, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and allocate:
            module.set_allocate_memory_from_process_group_for_comm(True)
    if factor is not None:
        assert isinstance(model, FSDPModule)
        model.set_gradient_divide_factor(factor)
    return [parameter.cpu() for parameter in whole(train(model, context))]


def check_fsdp(context: Context, make: Any, options: dict[str, Any], tolerance: float) -> None:
    world = dist.group.WORLD
    assert world is not None and context.gloo is not None
    expected = trained(context, context.gloo, make(), "cpu", options)
    found = trained(context, world, make(), context.device, options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "options", "tolerance"),
    [
        pytest.param(net, {}, 1e-5, id="float32"),
        pytest.param(net, {"mp_policy": BF16}, 2e-2, id="bfloat16", marks=pytest.mark.full),
        pytest.param(net, {"divide_factor": 3.0}, 1e-5, id="factor", marks=pytest.mark.full),
        pytest.param(
            net, {"reshard_after_forward": False}, 1e-5, id="kept", marks=pytest.mark.full
        ),
        pytest.param(net, {"allocate": True}, 1e-5, id="allocated", marks=pytest.mark.full),
        pytest.param(odd_net, {}, 1e-5, id="odd shapes", marks=pytest.mark.full),
    ],
)
def test_fsdp(delayed_pool: Pool, make: Any, options: dict[str, Any], tolerance: float) -> None:
    delayed_pool.run(check_fsdp, make, options, tolerance)
