"""Wrong arguments, options and environment: an exception that names the mistake, and no hang."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Context, Pool, beyond_gloo
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = beyond_gloo

Call = Callable[[Context], Any]


def ones(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def group() -> Any:
    """Return the group itself: its methods skip the checks of torch.distributed."""
    return _get_default_group()


def backend() -> Any:
    """Return the backend itself: PyTorch's dispatcher would not pass meta tensors to it."""
    return _get_default_group()._get_backend(torch.device("cpu"))


OVERLAP = torch.zeros(64)

# Mistakes that every rank makes alike: hbm finds them before it sends anything. Each has the call
# and words of the error's message.
LOCAL_MISTAKES: dict[str, tuple[Call, str]] = {
    "all_reduce of a device tensor": (
        lambda c: backend().allreduce([torch.empty(3, device="meta")]).wait(),
        "meta",
    ),
    "broadcast of a device tensor": (
        lambda c: backend().broadcast([torch.empty(3, device="meta")]).wait(),
        "meta",
    ),
    "all_gather of too few outputs": (
        lambda c: group().allgather([[ones()] * (c.size - 1)], [ones()]).wait(),
        r"\d",
    ),
    "all_gather of too many outputs": (
        lambda c: group().allgather([[ones() for _ in range(c.size + 1)]], [ones()]).wait(),
        r"\d",
    ),
    "all_gather into another size": (
        lambda c: group().allgather([[ones(5) for _ in range(c.size)]], [ones()]).wait(),
        r"5",
    ),
    "all_gather into another dtype": (
        lambda c: (
            group().allgather([[ones(4, torch.int32) for _ in range(c.size)]], [ones()]).wait()
        ),
        r"(?i)int",
    ),
    "all_gather_into_tensor of a wrong size": (
        lambda c: dist.all_gather_into_tensor(ones(4 * c.size + 1), ones()),
        r"\d",
    ),
    "reduce_scatter_tensor of a wrong size": (
        lambda c: dist.reduce_scatter_tensor(ones(4), ones(4 * c.size + 1)),
        r"\d",
    ),
    "reduce_scatter of too few inputs": (
        lambda c: group().reduce_scatter([ones()], [[ones()] * (c.size + 1)]).wait(),
        r"\d",
    ),
    "all_to_all_single not divisible": (
        lambda c: dist.all_to_all_single(ones(4 * c.size + 1), ones(4 * c.size + 1)),
        r"\d",
    ),
    "all_to_all_single with splits that do not add up": (
        lambda c: dist.all_to_all_single(ones(c.size), ones(c.size), [2] * c.size, [1] * c.size),
        r"\d",
    ),
    "all_to_all_single with too few splits": (
        lambda c: dist.all_to_all_single(ones(4), ones(4), [4] * (c.size + 1), [1] * c.size),
        r"\d",
    ),
    "all_to_all of too few tensors": (
        lambda c: group().alltoall([ones()] * (c.size + 1), [ones()] * c.size).wait(),
        r"\d",
    ),
    "all_gather into overlapping outputs": (
        lambda c: dist.all_gather([OVERLAP[r : r + 2] for r in range(c.size)], ones(2)),
        r"(?i)overlap|share memory",
    ),
    "all_gather_into_tensor onto its own input": (
        lambda c: dist.all_gather_into_tensor(OVERLAP[: 2 * c.size], OVERLAP[1:3]),
        r"(?i)overlap|share memory",
    ),
    "all_reduce of an expanded tensor": (
        lambda c: dist.all_reduce(torch.ones(1).expand(4)),
        r"(?i)overlap|stride|memory",
    ),
    "all_reduce of two tensors": (
        lambda c: group().allreduce([ones(), ones()]).wait(),
        r"(?i)one|1|2",
    ),
    "all_reduce of no tensor": (lambda c: group().allreduce([]).wait(), r"."),
    "coalesced reduction of two dtypes": (
        lambda c: group().allreduce_coalesced([ones(), ones(4, torch.int32)]).wait(),
        r"(?i)int",
    ),
    "band of floats": (lambda c: dist.all_reduce(ones(), dist.ReduceOp.BAND), r"(?i)float"),
    "min of complex numbers": (
        lambda c: dist.all_reduce(ones(4, torch.complex64), dist.ReduceOp.MIN),
        r"(?i)complex",
    ),
    "sparse broadcast": (lambda c: dist.broadcast(ones().to_sparse(), 0), r"(?i)sparse"),
    "sparse all_reduce by product": (
        lambda c: dist.all_reduce(ones().to_sparse(), dist.ReduceOp.PRODUCT),
        r"(?i)sparse|sum",
    ),
    "broadcast from beyond the group": (
        lambda c: group().broadcast(ones(), c.size + 3).wait(),
        r"\d",
    ),
    "reduce to a negative root": (lambda c: group().reduce(ones(), -2).wait(), r"-2"),
    "send beyond the group": (lambda c: group().send([ones()], c.size, 0).wait(), r"\d"),
    "recv from a negative rank": (lambda c: group().recv([ones()], -3, 0).wait(), r"-3"),
    "send with a negative tag": (
        lambda c: group().send([ones()], (c.rank + 1) % c.size, -1).wait(),
        r"(?i)tag",
    ),
}


def check_local_mistakes(context: Context) -> None:
    missed = []
    for name, (call, words) in LOCAL_MISTAKES.items():
        try:
            call(context)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            if not re.search(words, str(error)):
                missed.append(f"{name}: message lacks {words!r}: {error}")
        else:
            missed.append(f"{name}: no error")
    total = ones()
    dist.all_reduce(total)
    assert total[0].item() == context.size, "the group suffered from a refused call"
    assert not missed, "\n".join(missed)


@pytest.mark.ranks(2, 4)
def test_the_group_continues_after_refused_mistakes(pool: Pool) -> None:
    pool.run(check_local_mistakes)


# Ranks disagree: at least one rank raises an error that names the difference, and no rank hangs.


def shapes(context: Context) -> Any:
    return dist.all_reduce(ones(4 + context.rank))


def large_shapes(context: Context) -> Any:
    return dist.all_reduce(ones(400_000 + context.rank))


def shapes_of_broadcast(context: Context) -> Any:
    return dist.broadcast(ones(4 + context.rank), 0)


def shapes_of_all_gather(context: Context) -> Any:
    mine = ones(4 + context.rank)
    return dist.all_gather([torch.empty_like(mine) for _ in range(context.size)], mine)


def shapes_of_sparse(context: Context) -> Any:
    """The ranks' shapes differ. All indices are within each of the shapes."""
    index = torch.zeros(1, 1, dtype=torch.int64)
    return dist.all_reduce(torch.sparse_coo_tensor(index, ones(1), (4 + context.rank,)))


def dtypes(context: Context) -> Any:
    return dist.all_reduce(ones(4, torch.float32 if context.rank else torch.int32))


def operators(context: Context) -> Any:
    return dist.all_reduce(ones(), dist.ReduceOp.MAX if context.rank else dist.ReduceOp.SUM)


def roots(context: Context) -> Any:
    """Broadcast from different roots. A root notices the mistake only in the next collective."""
    dist.broadcast(ones(), context.rank % 2)
    dist.barrier()


def collectives(context: Context) -> Any:
    if context.rank == 0:
        return dist.all_reduce(ones())
    return dist.broadcast(ones(), 0)


def splits(context: Context) -> Any:
    give = [1] * context.size
    take = [2 if sender == 0 and context.rank else 1 for sender in range(context.size)]
    return dist.all_to_all_single(ones(sum(take)), ones(sum(give)), take, give)


def message_sizes(context: Context) -> Any:
    if context.rank == 0:
        return dist.send(ones(5), 1)
    if context.rank == 1:
        return dist.recv(ones(4), 0)
    return None


DISAGREEMENTS = [
    (shapes, r"\b[45]\b|\b1[68]\b|\b20\b"),
    (large_shapes, r"\d"),
    (shapes_of_broadcast, r"\d"),
    (shapes_of_all_gather, r"\d"),
    (shapes_of_sparse, r"shape \[4\].*rank 1"),
    (dtypes, r"(?i)int|float"),
    (operators, r"(?i)max|sum"),
    (roots, r"(?i)root|rank"),
    (collectives, r"(?i)all_?reduce|broadcast"),
    (splits, r"\d"),
    (message_sizes, r"\d"),
]


def disagree(context: Context, call: Call) -> str | None:
    dist.barrier(context.gloo)  # so no rank still loads modules
    try:
        call(context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("call", "words"), DISAGREEMENTS, ids=[call.__name__ for call, _ in DISAGREEMENTS]
)
def test_ranks_that_disagree(impatient_pool: Pool, call: Call, words: str) -> None:
    errors = [error for error in impatient_pool.run(disagree, call) if error]
    assert errors, "no rank raised"
    assert any(re.search(words, error) for error in errors), errors


# Options and environment.


def refused_start(context: Context, environment_only: bool, options: dict[str, Any]) -> str:
    import torch_hbmcomm as hbmcomm

    store = FileStore(str(context.folder / f"store{context.seed}"), context.size)
    try:
        pg_options = None if environment_only else hbmcomm.Options(**options)
        dist.init_process_group(
            BACKEND,
            store=store,
            rank=context.rank,
            world_size=context.size,
            timeout=timedelta(seconds=5),
            pg_options=pg_options,
        )
        dist.all_reduce(ones())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{options} was accepted")


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "fastest"}, "fastest"),
        ({"staging_bytes": -1}, "-1"),
        ({"reduce_threads": -2}, "-2"),
        ({"reduce_threads": 65}, "between 1 and 64"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"parameter_server": "http://nowhere"}, "http://nowhere"),
    ],
    ids=lambda value: str(value),
)
def test_wrong_option(bare_pool: Pool, options: dict[str, Any], words: str) -> None:
    for message in bare_pool.run(refused_start, False, options):
        assert words in message, message


def test_default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_hbmcomm as hbmcomm

    monkeypatch.setenv("HBMCOMM_REDUCE_THREADS", "3")
    assert hbmcomm.Options().reduce_threads == 3
    assert hbmcomm.Options(reduce_threads=64).reduce_threads == 64


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HBMCOMM_MEMORY", "fastest"),
        ("HBMCOMM_STAGING_BYTES", "lots"),
        ("HBMCOMM_REDUCE_THREADS", "-2"),
        ("HBMCOMM_ISA", "sse9"),
        ("HBMCOMM_PORTS", "41000"),
        ("HBMCOMM_INTERFACES", "eth7,"),
    ],
)
def test_wrong_environment(ranks: int, name: str, value: str) -> None:
    pool = Pool(ranks, bare=True, environment={name: value})
    try:
        for message in pool.run(refused_start, True, {}):
            assert name in message and value in message, message
    finally:
        pool.kill()


def one_rank_cannot(context: Context) -> str:
    if context.rank == 1:
        os.environ["HBMCOMM_BIND"] = "sock"
    try:
        dist.new_group(backend="hbm")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.ranks(2)
def test_every_rank_hears_of_one_that_cannot_take_part(fresh_pool: Pool) -> None:
    other, wrong = fresh_pool.run(one_rank_cannot)
    assert "rank 1" in other and "cannot take part" in other and "sock" in other
    assert wrong.startswith("ValueError") and "sock" in wrong


def bound_without_hbm(context: Context) -> str:
    """Form a group on a machine without HBM. Only rank 1 requires HBM (memory="bind")."""
    import torch_hbmcomm as hbmcomm

    os.environ["HBMCOMM_BIND"] = "numa"
    memory = "bind" if context.rank == 1 else "preferred"
    try:
        dist.new_group(backend="hbm", pg_options=hbmcomm.Options(memory=memory))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.ranks(2)
def test_every_rank_raises_if_one_is_bound_without_hbm(fresh_pool: Pool) -> None:
    import torch_hbmcomm as hbmcomm

    if hbmcomm.memory.available():
        pytest.skip("has high-bandwidth memory")
    other, own = fresh_pool.run(bound_without_hbm)
    assert "high-bandwidth memory" in own, own
    assert "rank 1" in other and "high-bandwidth memory" in other, other
