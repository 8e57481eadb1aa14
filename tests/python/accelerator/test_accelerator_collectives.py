"""Every collective, dtype, operator and size on tensors of the test accelerator.

Results of moves (collectives that only copy data) are compared with Gloo's, results of reductions
with NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.collectives import (
    Reduction,
    Tensors,
    all_gather,
    all_gather_into_stacked_tensor,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    all_to_all_single_unequal,
    broadcast,
    check_move,
    check_objects,
    check_reduction,
    gather,
    moves_in_tiers,
    reductions_in_tiers,
    scatter,
)
from harness.data import assert_reduced, assert_same, gathered, placed, random_numbers
from harness.reference import reduced

pytestmark = [beyond_gloo, pytest.mark.conformance, pytest.mark.ranks(2, 4)]

MOVES = moves_in_tiers(
    (
        broadcast,
        all_gather,
        all_gather_into_tensor,
        all_gather_into_stacked_tensor,
        gather,
        scatter,
        all_to_all_single,
        all_to_all_single_unequal,
        all_to_all,
    ),
    quick=(broadcast, all_gather_into_tensor, all_to_all_single_unequal),
)


@pytest.mark.parametrize("move", MOVES)
def test_move(delayed_pool: Pool, move: Callable[..., Tensors]) -> None:
    delayed_pool.run(check_move, move, limit=240)


@pytest.mark.parametrize(("reduction", "name"), reductions_in_tiers((all_reduce, "sum")))
def test_reduction(delayed_pool: Pool, reduction: Reduction, name: str) -> None:
    delayed_pool.run(check_reduction, reduction, name, limit=240)


def check_layouts(context: Context) -> None:
    data = random_numbers(context, (7, 11), torch.float32)
    everyone = gathered(context, data)
    total = reduced(everyone, "sum")
    transposed = placed(context, data.t()).t()
    dist.all_reduce(transposed)
    assert_reduced(transposed.cpu().contiguous(), total, "transposed")
    spaced = placed(context, torch.stack([data, torch.zeros_like(data)], -1))
    dist.all_reduce(spaced[..., 0])
    assert_reduced(spaced[..., 0].cpu().contiguous(), total, "spaced")
    assert not spaced[..., 1].cpu().any(), "a gap was written to"
    outputs = [placed(context, torch.zeros(11, 7)).t() for _ in range(context.size)]
    dist.all_gather(outputs, placed(context, data))
    for rank, output in enumerate(outputs):
        assert_same(output.cpu().contiguous(), everyone[rank], f"all_gather from {rank}")
    scalar = torch.tensor(float(context.rank), device=context.device)
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(context.size))


def test_layouts(delayed_pool: Pool) -> None:
    delayed_pool.run(check_layouts)


def check_in_place(context: Context) -> None:
    """Gather as FSDP does: the input is this rank's part of the output."""
    data = random_numbers(context, 1000, torch.float32)
    everyone = gathered(context, data)
    whole = torch.zeros(context.size * 1000, device=context.device)
    part = whole[context.rank * 1000 : (context.rank + 1) * 1000]
    part.copy_(data)
    dist.all_gather_into_tensor(whole, part)
    assert_same(whole.cpu(), torch.cat(everyone), "all_gather_into_tensor")
    dist.reduce_scatter_tensor(part, whole)
    own = everyone[context.rank]
    assert_reduced(part.cpu(), reduced([own] * context.size, "sum"), "reduce_scatter_tensor")


def test_in_place(delayed_pool: Pool) -> None:
    delayed_pool.run(check_in_place)


def check_coalesced(context: Context) -> None:
    data = [random_numbers(context, size, torch.float32) for size in (3, 700, 1)]
    expected = [reduced(gathered(context, each), "sum") for each in data]
    tensors = [placed(context, each) for each in data]
    group = dist.group.WORLD
    assert group is not None
    group.allreduce_coalesced(tensors).wait()
    for tensor, total in zip(tensors, expected, strict=True):
        assert_reduced(tensor.cpu(), total, "all_reduce_coalesced")
    inputs = [placed(context, each) for each in data]
    outputs = [each.new_empty(context.size * len(each)) for each in inputs]
    group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    for each, output in zip(data, outputs, strict=True):
        assert_same(output.cpu(), torch.cat(gathered(context, each)), "all_gather")


def test_coalesced(delayed_pool: Pool) -> None:
    delayed_pool.run(check_coalesced)


def check_object_collectives(context: Context) -> None:
    check_objects(context)
    on_device = dist.new_group(backend=f"{context.device}:hbm")
    everyone: list[object] = [None] * context.size
    dist.all_gather_object(everyone, {"rank": context.rank}, group=on_device)
    assert everyone == [{"rank": rank} for rank in range(context.size)]
    dist.destroy_process_group(on_device)


def test_object_collectives(delayed_pool: Pool) -> None:
    delayed_pool.run(check_object_collectives)
