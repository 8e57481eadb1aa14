"""Tensors in the segments that a node's ranks share: in collectives, in DDP and in FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import assert_reduced, assert_same, gathered, random_numbers
from harness.reference import reduced
from harness.segments import in_segment, in_use
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import memory

pytestmark = beyond_gloo

# The least sizes of zero-copy tensors, in csrc/communicator/shm/tuning.h: kZeroCopyReductionBytes,
# and kZeroCopyBytes
DIRECT_BYTES = (4 * 1024, 16 * 1024)
GUARD = 5  # elements before and after a slice


class Placer:
    """Makes copies of tensors at random places: private, in a segment, or inside another tensor."""

    def __init__(self, context: Context) -> None:
        self._random = context.own_random
        self._guards: list[torch.Tensor] = []

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        kind = self._random.choice(["private", "segment", "other policy", "slice", "gaps"])
        if kind == "private":
            return data.clone()
        if kind == "gaps":
            spaced = memory.empty((*data.shape, 2), data.dtype).zero_()
            self._guards.append(spaced[..., 1])
            return spaced[..., 0].copy_(data)
        if kind == "slice":
            begin = self._random.randrange(GUARD, 70)
            whole = memory.empty(begin + data.numel() + GUARD, data.dtype).zero_()
            self._guards += [whole[:begin], whole[begin + data.numel() :]]
            return whole[begin : begin + data.numel()].view(data.shape).copy_(data)
        policy: memory.Policy | None = "ddr" if kind == "other policy" else None
        return memory.empty(data.shape, data.dtype, policy).copy_(data)

    def check(self, what: str) -> None:
        """Check that nothing was written outside the tensors."""
        assert not any(guard.any() for guard in self._guards), f"{what}: written outside a tensor"


# Each function takes this rank's data and all ranks' data. Their length is a multiple of the number
# of ranks. The function returns pairs of this rank's result and the expected result.

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Everyone = list[torch.Tensor]


def finish(context: Context, call: Callable[..., Any], *arguments: Any) -> None:
    work = call(*arguments, async_op=context.own_random.random() < 0.5)
    if work is not None:
        work.wait()


def part(context: Context, whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(context.size)[context.rank]


def all_reduce(context: Context, place: Placer, data: torch.Tensor, everyone: Everyone) -> Pairs:
    got = place(data)
    finish(context, dist.all_reduce, got)
    return [(got, reduced(everyone, "sum"))]


def reduce(context: Context, place: Placer, data: torch.Tensor, everyone: Everyone) -> Pairs:
    got, root = place(data), context.shared_random.randrange(context.size)
    finish(context, dist.reduce, got, root, dist.ReduceOp.AVG)
    return [(got, reduced(everyone, "avg"))] if context.rank == root else []


def reduce_scatter(
    context: Context, place: Placer, data: torch.Tensor, everyone: Everyone
) -> Pairs:
    got = place(part(context, data))
    parts = [place(share) for share in data.chunk(context.size)]
    finish(context, dist.reduce_scatter, got, parts)
    return [(got, part(context, reduced(everyone, "sum")))]


def reduce_scatter_tensor(
    context: Context, place: Placer, data: torch.Tensor, everyone: Everyone
) -> Pairs:
    got = place(part(context, data))
    finish(context, dist.reduce_scatter_tensor, got, place(data))
    return [(got, part(context, reduced(everyone, "sum")))]


def broadcast(context: Context, place: Placer, data: torch.Tensor, everyone: Everyone) -> Pairs:
    got, root = place(data), context.shared_random.randrange(context.size)
    finish(context, dist.broadcast, got, root)
    return [(got, everyone[root])]


def all_gather(context: Context, place: Placer, data: torch.Tensor, everyone: Everyone) -> Pairs:
    got = [place(torch.zeros_like(data)) for _ in everyone]
    finish(context, dist.all_gather, got, place(data))
    return list(zip(got, everyone, strict=True))


def all_gather_into_tensor(
    context: Context, place: Placer, data: torch.Tensor, everyone: Everyone
) -> Pairs:
    got = place(data.new_zeros(context.size * len(data)))
    finish(context, dist.all_gather_into_tensor, got, place(data))
    return [(got, torch.cat(everyone))]


def gather(context: Context, place: Placer, data: torch.Tensor, everyone: Everyone) -> Pairs:
    root = context.shared_random.randrange(context.size)
    got = [place(torch.zeros_like(data)) for _ in everyone] if context.rank == root else []
    finish(context, dist.gather, place(data), got or None, root)
    return list(zip(got, everyone, strict=True)) if got else []


def scatter(context: Context, place: Placer, data: torch.Tensor, everyone: Everyone) -> Pairs:
    root = context.shared_random.randrange(context.size)
    parts = [place(share) for share in data.chunk(context.size)] if context.rank == root else None
    got = place(torch.zeros_like(part(context, data)))
    finish(context, dist.scatter, got, parts, root)
    return [(got, part(context, everyone[root]))]


def all_to_all(context: Context, place: Placer, data: torch.Tensor, everyone: Everyone) -> Pairs:
    got = [place(torch.zeros_like(share)) for share in data.chunk(context.size)]
    finish(context, dist.all_to_all, got, [place(share) for share in data.chunk(context.size)])
    return [(mine, part(context, other)) for mine, other in zip(got, everyone, strict=True)]


def all_to_all_single(
    context: Context, place: Placer, data: torch.Tensor, everyone: Everyone
) -> Pairs:
    got = place(torch.zeros_like(data))
    finish(context, dist.all_to_all_single, got, place(data))
    return [(got, torch.cat([part(context, other) for other in everyone]))]


def send_and_receive(
    context: Context, place: Placer, data: torch.Tensor, everyone: Everyone
) -> Pairs:
    right, left = (context.rank + 1) % context.size, (context.rank - 1) % context.size
    got = place(torch.zeros_like(data))
    works = [dist.isend(place(data), right), dist.irecv(got, left)]
    for work in works:
        assert work is not None
        work.wait()
    return [(got, everyone[left])]


COLLECTIVES = [
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    send_and_receive,
]


def lengths(ranks: int, dtype: torch.dtype) -> list[int]:
    """Return lengths of a rank's part, in elements.

    With some lengths one part has about one of the DIRECT_BYTES. With others all ranks' parts
    together have.
    """
    near: list[int] = []
    for direct in (size // dtype.itemsize for size in DIRECT_BYTES):
        near += [direct + step for step in (-1, 0, 1)] + [direct // ranks + step for step in (0, 1)]
    return [1, 37, *near, 40_001]


def check_mixed(context: Context, collective: Callable[..., Pairs]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for length in lengths(context.size, dtype):
            what = f"{dtype} x {length} x {context.size} ranks"
            data = random_numbers(context, length * context.size, dtype)
            place = Placer(context)
            for got, expected in collective(context, place, data, gathered(context, data)):
                plain = got.clone(memory_format=torch.contiguous_format)
                assert_reduced(plain, expected, what)
            place.check(what)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_tensors_of_some_ranks_in_segments(pool: Pool, collective: Callable[..., Pairs]) -> None:
    pool.run(check_mixed, collective)


# DistributedDataParallel.


def model_with_gradients(context: Context, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(300, 200), gradient_as_bucket_view=True, **options)
    for _ in range(2):  # DDP arranges its buckets again after the first step
        model.zero_grad()
        model(torch.full((4, 300), context.rank + 1.0)).square().mean().backward()
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert None not in found
    return [gradient for gradient in found if gradient is not None]


def check_buckets(context: Context, expected: bool) -> None:
    model = model_with_gradients(context)
    assert [in_segment(gradient) for gradient in gradients(model)] == [expected] * 2


@pytest.mark.ranks(1, 2)
def test_ddp_buckets_are_in_the_segment(pool: Pool) -> None:
    pool.run(check_buckets, True)


@pytest.mark.ranks(2)
def test_ddp_buckets_follow_the_users_choice() -> None:
    private = Pool(2, environment={"DDP_DISABLE_COMM_MEM": "1"})
    try:
        private.run(check_buckets, False)
    finally:
        private.kill()


def check_gradients_outlive_the_group(context: Context) -> None:
    before = in_use()
    model = model_with_gradients(context)
    held_before = gradients(model)
    values = [gradient.clone() for gradient in held_before]
    dist.destroy_process_group()
    del model
    gc.collect()
    for gradient, value in zip(held_before, values, strict=True):
        assert in_segment(gradient)
        assert_same(gradient, value, "a gradient without its group")
        gradient.mul_(2)
    assert in_use() > 0
    del held_before, gradient
    gc.collect()
    assert in_use() <= before, "the buckets did not go back"


@pytest.mark.ranks(1, 2)
def test_gradients_outlive_the_group(fresh_pool: Pool) -> None:
    fresh_pool.run(check_gradients_outlive_the_group)


# FSDP2.


def train_sharded(context: Context, group: dist.ProcessGroup, from_group: bool) -> Everyone:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(96, 161), nn.ReLU(), nn.Linear(161, 96))
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule) and from_group:
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.Generator().manual_seed(context.seed + context.rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 96, generator=inputs)).square().mean().backward()
        optimizer.step()
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert len(sharded) == 4
    return [parameter.full_tensor() for parameter in sharded]


# Functions that FSDP2 calls: names of PyTorch 2.13, or of earlier releases.
SHARDED_CALLS = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def check_sharded(context: Context, from_group: bool) -> None:
    places: list[bool] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            tensors = [*arguments, *options.values()]
            places.extend(in_segment(t) for t in tensors if isinstance(t, torch.Tensor))
            return call(*arguments, **options)

        return wrapper

    group = dist.group.WORLD
    assert group is not None and context.gloo is not None
    with pytest.MonkeyPatch.context() as patch:
        for name in SHARDED_CALLS:
            patch.setattr(dist, name, watched(getattr(dist, name)))
        ours = train_sharded(context, group, from_group)
    assert places and set(places) == {from_group}
    theirs = train_sharded(context, context.gloo, False)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("from_group", [True, False])
def test_fsdp_buffers(pool: Pool, from_group: bool) -> None:
    pool.run(check_sharded, from_group)
