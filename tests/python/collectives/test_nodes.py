"""Several nodes: every collective, exchanged by leaders, and groups within and across nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo, collectives, messages
from harness.cases import cases
from harness.data import assert_same, gathered, random_numbers
from harness.nodes import on_nodes, reduced_over_nodes
from harness.pairwise import in_turn
from harness.reference import operands_of, reduce_op, supported_operators
from harness.training import STEPS, batch, net, train, weights
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import memory

pytestmark = beyond_gloo

LAYOUTS = ["ab", "aabb", "aaab", "abcc", "abab"]
KIB = 1 << 10
# Elements of float32. Up to 64 KiB (kOneLeaderBytes) one leader of a node exchanges all data. The
# largest sizes have several blocks, with one leader and with two.
SIZES = [0, 1, 2, 7, 1021, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 30_011, 65_537, 300_007, 2_500_009]
ONE_LEADER_SIZES = [0, 1, 17, 1021]
PAST_ONE_LEADER = 64 * KIB + 1  # bytes


class Cluster:
    """Ranks of one machine in a layout of nodes."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.pool = Pool(len(layout), bare=True)

    def run(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.pool.run(on_nodes, self.layout, call, *arguments, limit=120)


@pytest.fixture(scope="module", params=cases(LAYOUTS, quick=["aabb"]))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    yield made
    assert not any(made.pool.close()), "a rank left with an error code"


every_layout = pytest.mark.parametrize("cluster", LAYOUTS, indirect=True, scope="module")


# allreduce.


def all_reduce(data: torch.Tensor, name: str, async_op: bool) -> None:
    options = dist.AllreduceOptions()  # torch.distributed itself refuses some meaningful operators
    options.reduceOp, options.asyncOp = reduce_op(name), async_op
    _get_default_group().allreduce([data], options).wait()


def shared_copy(data: torch.Tensor) -> torch.Tensor:
    return memory.empty(data.shape, dtype=data.dtype).copy_(data)


def check_everywhere(context: Context, result: torch.Tensor, what: str) -> None:
    for rank, other in enumerate(gathered(context, result)):
        assert_same(other, result, f"{what}, rank {rank} against rank {context.rank}")


def check_operator(context: Context, name: str, layout: str) -> None:
    for dtype in operands_of(name):
        for turn, size in enumerate([*ONE_LEADER_SIZES, PAST_ONE_LEADER // dtype.itemsize + 1]):
            what = f"{name} of {dtype} x {size}"
            data = random_numbers(context, size, dtype, small=name in ("product", "premul_sum"))
            expected = reduced_over_nodes(gathered(context, data), name, layout)
            all_reduce(data, name, async_op=turn % 2 == 0)
            assert_same(data, expected, what)


@pytest.mark.parametrize("name", supported_operators())
def test_every_operator_and_dtype(cluster: Cluster, name: str) -> None:
    cluster.run(check_operator, name, cluster.layout)


def spread(context: Context, size: int) -> torch.Tensor:
    """Return numbers of very different magnitude: a sum in another order has other last bits."""
    scale = torch.randint(-12, 12, (size,), generator=context.generator)
    return random_numbers(context, size, torch.float32) * 2.0**scale


def private_copy(data: torch.Tensor) -> torch.Tensor:
    return data.clone()


PLACEMENTS = [private_copy, shared_copy]


def check_sizes(context: Context, layout: str) -> None:
    """Reduce tensors in segments, private ones, and both kinds mixed at random over the ranks."""
    for size in SIZES:
        data = spread(context, size)
        inputs = gathered(context, data)
        for name in ("sum", "avg"):
            expected = reduced_over_nodes(inputs, name, layout)
            mixed = context.own_random.choice(PLACEMENTS)
            for place in (*PLACEMENTS, mixed):
                total = place(data)
                all_reduce(total, name, async_op=context.shared_random.random() < 0.5)
                assert_same(total, expected, f"{name} x {size}, {place.__name__}")


def test_sizes_and_locations(cluster: Cluster) -> None:
    cluster.run(check_sizes, cluster.layout)


def check_strided(context: Context, layout: str) -> None:
    data = spread(context, 40_000)
    expected = reduced_over_nodes(gathered(context, data), "sum", layout)
    spaced = torch.zeros(40_000, 2)
    spaced[:, 0] = data
    dist.all_reduce(spaced[:, 0])
    assert_same(spaced[:, 0].contiguous(), expected, "strided")
    assert not spaced[:, 1].any(), "a gap was written to"


def test_strided_tensors(cluster: Cluster) -> None:
    cluster.run(check_strided, cluster.layout)


def check_in_flight(context: Context, layout: str) -> None:
    """Issue all_reduces of few and many elements. Each rank waits for them in its own order."""
    sizes = [context.shared_random.choice([1, 100, 20_000, 300_000, 700_001]) for _ in range(24)]
    datas = [spread(context, size) for size in sizes]
    expected = [reduced_over_nodes(gathered(context, data), "sum", layout) for data in datas]
    totals = [shared_copy(data) if index % 3 == 0 else data for index, data in enumerate(datas)]
    works = [(index, dist.all_reduce(total, async_op=True)) for index, total in enumerate(totals)]
    context.own_random.shuffle(works)
    for index, work in works:
        assert work is not None
        work.wait()
        assert_same(totals[index], expected[index], f"number {index}, x {sizes[index]}")


@every_layout
def test_many_in_flight(cluster: Cluster) -> None:
    cluster.run(check_in_flight, cluster.layout)


# All other operations, with the same checks as on one node.


@pytest.mark.parametrize(
    "move",
    [
        collectives.broadcast,
        collectives.all_gather,
        collectives.all_gather_into_tensor,
        collectives.gather,
        collectives.scatter,
        collectives.all_to_all_single_unequal,
    ],
)
def test_moves(cluster: Cluster, move: Callable[..., Any]) -> None:
    cluster.run(collectives.check_move, move)


def check_reduction(
    context: Context, reduction: collectives.Reduction, name: str, layout: str
) -> None:
    reference = partial(reduced_over_nodes, layout=layout)
    collectives.check_reduction(context, reduction, name, reference)


REDUCTIONS = [collectives.reduce, collectives.reduce_scatter, collectives.reduce_scatter_tensor]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(cluster: Cluster, reduction: Callable[..., Any]) -> None:
    """The cases have every pair of values of two of these: layout, reduction and operator."""
    numbers = LAYOUTS.index(cluster.layout), REDUCTIONS.index(reduction)
    name = in_turn(["avg", "max", "sum"], *numbers)
    cluster.run(check_reduction, reduction, name, cluster.layout)


@pytest.mark.parametrize(
    "check",
    [
        collectives.check_sparse,
        collectives.check_objects,
        messages.check_ring,
        messages.check_blocking,
        messages.check_order,
        messages.check_any_source,
        messages.check_mixed,
    ],
)
def test_as_on_one_node(cluster: Cluster, check: Callable[..., Any]) -> None:
    cluster.run(check)


# Groups of some of the ranks.


def check_subsets(context: Context, layout: str) -> None:
    """Check every subset of the ranks: on one node, and across nodes."""
    for mask in range(1, 1 << context.size):
        members = [rank for rank in range(context.size) if mask >> rank & 1]
        group = dist.new_group(members)
        if context.rank not in members:
            continue
        for size in (5, 60_000):
            inputs = [numbers_of(context, rank, size) for rank in members]
            total = numbers_of(context, context.rank, size)
            dist.all_reduce(total, group=group)
            nodes = "".join(layout[rank] for rank in members)
            assert_same(total, reduced_over_nodes(inputs, "sum", nodes), f"{members} x {size}")
            dist.broadcast(total, members[-1], group=group)
        dist.destroy_process_group(group)


def as_rank(context: Context, rank: int) -> Context:
    """Return a context that draws the data of `rank`."""
    return Context(rank, context.size, None, context.folder, context.seed)


def numbers_of(context: Context, rank: int, size: int) -> torch.Tensor:
    return random_numbers(as_rank(context, rank), size, torch.float32)


def test_every_subset(cluster: Cluster) -> None:
    cluster.run(check_subsets, cluster.layout)


# Training.


def train_alone(context: Context) -> list[torch.Tensor]:
    """Return the weights of one process that trains with the data of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        batches = [batch(as_rank(context, rank), step) for rank in range(context.size)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def check_training(context: Context) -> None:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    for index, (ours, alone) in enumerate(
        zip(train(model, context), train_alone(context), strict=True)
    ):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-6)
        check_everywhere(context, ours, f"parameter {index}")


def test_training_is_as_in_one_process(cluster: Cluster) -> None:
    cluster.run(check_training)
