"""Batches and coalesced calls with a refused operation: nothing moves, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = beyond_gloo

CPU = torch.device("cpu")
FAR_TAG = 1 << 40  # too large for a C int


def interrupted(*_args: Any, **_kwargs: Any) -> None:
    raise KeyboardInterrupt


def exchange(context: Context, value: float) -> tuple[torch.Tensor, list[dist.P2POp]]:
    """Return a tensor and a batch. The batch receives from the previous rank into the tensor.

    The batch sends `value` and this rank's number to the next rank.
    """
    before, after = (context.rank - 1) % context.size, (context.rank + 1) % context.size
    got = torch.zeros(2)
    sent = torch.tensor([value, float(context.rank)])
    return got, [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]


def replaced(operation: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    operation.tensor = tensor
    return operation


def calling(operation: dist.P2POp, function: Any) -> dist.P2POp:
    operation.op = function
    return operation


# Bad operations by name. Each has a function, which takes this rank and a peer and returns the
# operation, and the error that the batch raises.
REFUSED: dict[str, tuple[Callable[[int, int], dist.P2POp], type[BaseException]]] = {
    "to itself": (lambda own, _: dist.P2POp(dist.isend, torch.ones(3), own), ValueError),
    "from itself": (lambda own, _: dist.P2POp(dist.irecv, torch.ones(3), own), ValueError),
    "into an expanded tensor": (
        lambda _, peer: dist.P2POp(dist.irecv, torch.zeros(1).expand(3), peer),
        ValueError,
    ),
    "into windows": (
        lambda _, peer: dist.P2POp(dist.irecv, torch.zeros(4).unfold(0, 2, 1), peer),
        ValueError,
    ),
    "a negative tag": (
        lambda _, peer: dist.P2POp(dist.isend, torch.ones(3), peer, tag=-5),
        ValueError,
    ),
    # These never reach the backend.
    "a tag that is no int": (
        lambda _, peer: dist.P2POp(dist.isend, torch.ones(3), peer, tag=FAR_TAG),
        TypeError,
    ),
    "a sparse tensor": (
        lambda _, peer: replaced(
            dist.P2POp(dist.isend, torch.ones(3), peer), torch.ones(3).to_sparse()
        ),
        NotImplementedError,
    ),
    "Ctrl-C": (
        lambda _, peer: calling(dist.P2POp(dist.isend, torch.ones(3), peer), interrupted),
        KeyboardInterrupt,
    ),
}


def check_group(context: Context) -> None:
    """Check that every kind of call on the group works, and gets no data of a refused call."""
    size = context.size
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.tolist() == [size, size]
    every = torch.zeros(size)
    dist.all_gather_into_tensor(every, torch.tensor([float(context.rank)]))
    assert every.tolist() == list(range(size))
    own = torch.zeros(1)
    dist.reduce_scatter_tensor(own, torch.ones(size))
    assert own.item() == size
    got, batch = exchange(context, 7.0)
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert got.tolist() == [7.0, float((context.rank - 1) % size)]
    got, batch = exchange(context, 8.0)
    works = [operation.op(operation.tensor, operation.peer) for operation in batch]
    for one in works:
        assert one is not None
        one.wait()
    assert got.tolist() == [8.0, float((context.rank - 1) % size)]


def check_refused(context: Context) -> None:
    for name, (make, error) in REFUSED.items():
        for place in (0, 1, 2):
            got, batch = exchange(context, -1.0)
            batch.insert(place, make(context.rank, (context.rank + 1) % context.size))
            with pytest.raises(error):
                dist.batch_isend_irecv(batch)
            assert got.tolist() == [0.0, 0.0], name
        check_group(context)


@pytest.mark.ranks(2, 3)
def test_batch_with_a_refused_operation_moves_nothing(pool: Pool) -> None:
    pool.run(check_refused)


@contextmanager
def refused(error: type[BaseException], **options: Any) -> Iterator[None]:
    with pytest.raises(error), distributed_c10d._coalescing_manager(**options):
        yield


def check_manager(context: Context) -> None:
    for options in ({}, {"device": CPU}, {"device": CPU, "async_ops": True}):
        with refused(ValueError, **options):  # of two dtypes
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2, dtype=torch.int32))
        check_group(context)
        with refused(RuntimeError, **options):  # of two kinds
            dist.all_reduce(torch.ones(2))
            dist.reduce_scatter_tensor(torch.ones(1), torch.ones(context.size))
        check_group(context)
        with refused(ValueError, **options):
            dist.all_gather_into_tensor(torch.ones(context.size), torch.ones(1))
            dist.all_gather_into_tensor(torch.ones(context.size + 1), torch.ones(1))
        check_group(context)
        with refused(ZeroDivisionError, **options):
            dist.all_reduce(torch.ones(2))
            raise ZeroDivisionError
        check_group(context)
    with refused(ValueError, device=CPU):
        dist.isend(torch.ones(3), context.rank)
        refused_too = dist.irecv(torch.ones(3), (context.rank + 1) % context.size)
        assert refused_too is not None and refused_too.is_completed()
        with pytest.raises(ValueError, match="own peer"):
            refused_too.wait()
    check_group(context)


def check_waits_within(context: Context) -> None:
    """Wait within the batch: the call begins the operation that it waits for."""
    before, after = (context.rank - 1) % context.size, (context.rank + 1) % context.size
    got = torch.zeros(2)
    with distributed_c10d._coalescing_manager(device=CPU, async_ops=True):
        sent = dist.isend(torch.full((2,), float(context.rank)), after)
        assert sent is not None and not sent.is_completed()
        sent.get_future()
        dist.recv(got, before)
        assert got.tolist() == [before, before]
    check_group(context)


# The second pair of tensors is bad. The call is refused, so the first pair is not moved either.
COALESCED: dict[str, Callable[[list[torch.Tensor], int], Any]] = {
    "allgather_into_tensor_coalesced": lambda outs, size: (
        _get_default_group().allgather_into_tensor_coalesced(
            [outs[0], torch.zeros(size + 1)], [torch.ones(1), torch.ones(1)]
        )
    ),
    "reduce_scatter_tensor_coalesced": lambda outs, size: (
        _get_default_group().reduce_scatter_tensor_coalesced(
            [outs[0][:1], torch.zeros(1)], [torch.ones(size), torch.ones(size + 1)]
        )
    ),
    "all_gather_coalesced": lambda outs, size: _get_default_group().allgather_coalesced(
        [[part, torch.zeros(2)] for part in outs[0].split(1)], [torch.ones(1), torch.ones(1)]
    ),
}


def check_coalesced(context: Context) -> None:
    for name, call in COALESCED.items():
        outs = [torch.zeros(context.size)]
        with pytest.raises(ValueError):
            call(outs, context.size)
        dist.barrier()  # returns after all issued operations
        assert outs[0].tolist() == [0.0] * context.size, name
    check_group(context)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("check", [check_manager, check_waits_within, check_coalesced])
def test_refusals(pool: Pool, check: Callable[..., Any]) -> None:
    pool.run(check)


def check_aborted(context: Context) -> None:
    group = dist.new_group(backend="hbm")
    group.abort()
    with distributed_c10d._coalescing_manager(group, CPU, async_ops=True):
        pass  # an empty batch never raises
    for _ in range(2):
        got = torch.zeros(1)
        peer = (context.rank + 1) % context.size
        batch = [
            dist.P2POp(dist.isend, torch.ones(1), peer, group),
            dist.P2POp(dist.irecv, got, peer, group),
        ]
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.batch_isend_irecv(batch)
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(torch.ones(2), group=group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_batch_on_an_aborted_group_leaves_it_raising(pool: Pool) -> None:
    pool.run(check_aborted)
