"""Groups of some of the ranks: new_group, split_group, overlapping, reordered, many, released."""

from __future__ import annotations

import gc
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Context, Pool, beyond_gloo

pytestmark = pytest.mark.conformance


def total_over(group: dist.ProcessGroup | None, value: float, size: int = 3) -> float:
    data = torch.full((size,), value)
    dist.all_reduce(data, group=group)
    assert (data == data[0]).all()
    return data[0].item()


def check_every_subset(context: Context) -> None:
    """Check all subsets of up to three ranks, in several orders of the list."""
    for count in range(1, min(context.size, 3) + 1):
        for members in itertools.combinations(range(context.size), count):
            listed = list(members)
            context.shared_random.shuffle(listed)
            group = dist.new_group(listed)
            if context.rank in members:
                assert total_over(group, context.rank + 1.0) == sum(members) + count
                assert dist.get_backend(group) == BACKEND
                dist.destroy_process_group(group)


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_small_subset(pool: Pool) -> None:
    pool.run(check_every_subset)


def check_only_members_call(context: Context) -> None:
    """Let only the members call new_group(), with use_local_synchronization."""
    members = list(range(0, context.size, 2))
    if context.rank in members:
        group = dist.new_group(members, use_local_synchronization=True)
        assert total_over(group, 1.0) == len(members)
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.every_size
def test_only_members_call(fresh_pool: Pool) -> None:
    """The test has its own pool, because such a group changes the names of later groups.

    From 2.14 on, PyTorch counts the group on its members only, and names groups by the count. So
    the names would differ between ranks.
    """
    fresh_pool.run(check_only_members_call)


def check_roots_and_sources(context: Context) -> None:
    """Roots, sources and destinations are global ranks, unless group_* says otherwise."""
    members = list(range(1, context.size))
    group = dist.new_group(members)
    if context.rank in members:
        data = torch.tensor([float(context.rank)])
        dist.broadcast(data, src=members[-1], group=group)
        assert data.item() == members[-1]
        data.fill_(context.rank)
        dist.broadcast(data, group_src=0, group=group)
        assert data.item() == members[0]
        if context.rank == members[0]:
            dist.send(torch.ones(1), members[-1], group=group)
        elif context.rank == members[-1]:
            got = torch.zeros(1)
            assert dist.recv(got, group=group) == members[0]
            assert got.item() == 1.0
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.ranks(3, 4, 8)
def test_roots_are_global_ranks(pool: Pool) -> None:
    pool.run(check_roots_and_sources)


def check_grid(context: Context) -> None:
    """Use overlapping groups: the rows and the columns of a grid of ranks."""
    columns = 2
    rows = context.size // columns
    grid = torch.arange(context.size).reshape(rows, columns)
    row_groups = [dist.new_group(row.tolist()) for row in grid]
    column_groups = [dist.new_group(column.tolist()) for column in grid.t()]
    row, column = divmod(context.rank, columns)
    for step in range(20):
        value = context.rank + step + 0.0
        works = []
        across, down = torch.tensor([value]), torch.tensor([value])
        works.append(dist.all_reduce(across, group=row_groups[row], async_op=True))
        works.append(dist.all_reduce(down, group=column_groups[column], async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        assert across.item() == grid[row].sum().item() + step * columns
        assert down.item() == grid[:, column].sum().item() + step * rows
    dist.barrier()
    dist.destroy_process_group(row_groups[row])
    dist.destroy_process_group(column_groups[column])


@pytest.mark.ranks(2, 4, 8)
def test_rows_and_columns(pool: Pool) -> None:
    pool.run(check_grid)


def check_made_and_released(context: Context, count: int) -> None:
    for step in range(count):
        group = dist.new_group()
        if step % 10 == 0:
            assert total_over(group, 1.0) == context.size
        dist.destroy_process_group(group)
    gc.collect()
    assert total_over(None, 1.0) == context.size


@pytest.mark.ranks(1, 2, 4)
def test_many_groups_made_and_released(pool: Pool) -> None:
    pool.run(check_made_and_released, 60, limit=100)


def check_unused_group(context: Context) -> None:
    """Check that a group that is never used ends without an error."""
    dist.new_group(timeout=timedelta(seconds=5))
    assert total_over(None, 2.0) == 2.0 * context.size


def test_unused_group(pool: Pool) -> None:
    pool.run(check_unused_group)


def check_split_group(context: Context) -> None:
    import torch_hbmcomm as hbmcomm

    halves = [list(range(0, context.size, 2)), list(range(1, context.size, 2))]
    group = hbmcomm.split_group(split_ranks=halves)
    mine = halves[context.rank % 2]
    assert group is not None and dist.get_world_size(group) == len(mine)
    assert total_over(group, context.rank + 0.0) == sum(mine)

    first = hbmcomm.split_group(split_ranks=[[0]])
    assert (first is not None) == (context.rank == 0)
    dist.barrier()


@beyond_gloo
@pytest.mark.ranks(2, 3, 4, 8)
def test_split_group(pool: Pool) -> None:
    pool.run(check_split_group)


def check_split_by_pytorch(context: Context) -> None:
    """ProcessGroup.split_group() splits each of a group's backends."""
    world = dist.group.WORLD
    assert world is not None
    group = world.split_group(list(range(context.size)))
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    assert backend.name() == "hbm" and backend.rank() == context.rank
    data = torch.tensor([context.rank + 1.0])
    group.allreduce([data]).wait()
    assert data.item() == sum(range(context.size + 1))
    backend.shutdown()


@beyond_gloo
@pytest.mark.ranks(2)
def test_split_by_pytorch(pool: Pool) -> None:
    pool.run(check_split_by_pytorch)


def check_uneven_split(context: Context) -> None:
    """Split the world when the ranks are already in different numbers of groups."""
    import torch_hbmcomm as hbmcomm

    for count in range(3):
        dist.new_group([count % context.size])
    for size in (context.size, 1):
        parts = [list(range(size)), *([rank] for rank in range(size, context.size))]
        group = hbmcomm.split_group(split_ranks=parts)
        assert group is not None
        assert total_over(group, 1.0) == dist.get_world_size(group)
        assert dist.get_group_rank(group, context.rank) == group.rank()


@beyond_gloo
@pytest.mark.ranks(2, 3)
def test_split_group_of_ranks_in_different_numbers_of_groups(pool: Pool) -> None:
    pool.run(check_uneven_split)


def check_names(context: Context) -> None:
    group = dist.new_group(group_desc="two words")
    assert group.group_desc == "two words"
    assert total_over(group, 1.0) == context.size
    dist.destroy_process_group(group)


def test_described_group(pool: Pool) -> None:
    pool.run(check_names)


def check_gloo_alternately(context: Context) -> None:
    """Use groups of another backend over the same ranks, alternately with ours."""
    for step in range(20):
        group = context.gloo if step % 2 else None
        assert total_over(group, 1.0, size=1 + 1000 * step) == context.size


def test_gloo_groups_alternate_with_ours(pool: Pool) -> None:
    pool.run(check_gloo_alternately)
