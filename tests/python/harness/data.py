"""Random tensors of every dtype, and comparison bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from harness.context import BACKEND, Context

FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]
FLOAT = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGER = [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
ALL_DTYPES = [torch.bool, *INTEGER, *FLOAT8, torch.float8_e8m0fnu, *FLOAT, *COMPLEX]
_GLOO_DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, *FLOAT]

SMALL_SIZES = [0, 1, 2, 3, 17, 1021]
MEDIUM_SIZE = 65537
LARGE_SIZES = [300_000, 1_500_000]  # of float32: more than one staging chunk


def supported(wanted: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Return the dtypes of `wanted` that the backend under test supports. hbm supports all."""
    return [d for d in wanted if BACKEND != "gloo" or d in _GLOO_DTYPES]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, by which tensors of all dtypes can be compared."""
    if tensor.numel() == 0:  # may have strides that cannot be viewed
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bits(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return raw.view(like.dtype).reshape(like.shape)


def random_bits(context: Context, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return random bit patterns of the dtype, not-a-numbers included, different on every rank."""
    full = (shape,) if isinstance(shape, int) else tuple(shape)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(
        0, high, (*full, dtype.itemsize), generator=context.generator, dtype=torch.uint8
    )
    return raw.view(dtype).reshape(full)


def random_numbers(
    context: Context, shape: int | Sequence[int], dtype: torch.dtype, *, small: bool = False
) -> torch.Tensor:
    """Return random finite numbers, different on every rank.

    small: the numbers are near 1, so that products stay in range.
    """
    full = (shape,) if isinstance(shape, int) else tuple(shape)
    if dtype.is_complex:
        parts = random_numbers(context, (*full, 2), dtype.to_real(), small=small)
        return torch.view_as_complex(parts)
    if dtype.is_floating_point:
        values = torch.rand(full, generator=context.generator, dtype=torch.float64)
        return (0.75 + 0.5 * values if small else 8 * values - 4).to(dtype)
    if small:
        return torch.randint(1, 3, full, generator=context.generator).to(dtype)
    return random_bits(context, full, dtype)


def placed(context: Context, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` on the context's device; the copy may still be in flight."""
    return tensor.to(context.device).clone()


def gathered(context: Context, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's tensor, gathered over Gloo. REQUIRES: equal shapes and dtypes."""
    mine = bits(tensor)
    everyone = [torch.empty_like(mine) for _ in range(context.size)]
    if mine.numel():
        dist.all_gather(everyone, mine, group=context.gloo)
    return [from_bits(other, tensor) for other in everyone]


def shared_out(context: Context, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Assign the tensors to ranks, round-robin. Each rank gets its tensors from all ranks.

    Returns a list for each tensor. On the assigned rank, the list has the tensors of all ranks; on
    other ranks it is empty. So one rank alone computes the reference for a tensor.

    REQUIRES: equal shapes and dtypes on all ranks.
    """
    mine = [bits(tensor) for tensor in tensors]
    counts = [sum(map(len, mine[rank :: context.size])) for rank in range(context.size)]
    sent = torch.cat([part for rank in range(context.size) for part in mine[rank :: context.size]])
    got = sent.new_empty(context.size * counts[context.rank])
    if max(counts):
        taken = [counts[context.rank]] * context.size
        dist.all_to_all_single(got, sent, taken, counts, group=context.gloo)
    widths = [len(part) for part in mine[context.rank :: context.size]]
    by_rank = [whole.split(widths) for whole in got.reshape(context.size, -1)]
    return [
        [from_bits(parts[index // context.size].clone(), tensor) for parts in by_rank]
        if index % context.size == context.rank
        else []
        for index, tensor in enumerate(tensors)
    ]


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert equality of bits, with the first mismatch in the message."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    found, wanted = bits(actual), bits(expected)
    if torch.equal(found, wanted):
        return
    width = actual.dtype.itemsize
    wrong = (found != wanted).reshape(-1, width).any(dim=1).nonzero().flatten()
    first = int(wrong[0])
    raise AssertionError(
        f"{what}: {len(wrong)} of {actual.numel()} elements differ; the first, at {first}, has "
        f"bytes {found.reshape(-1, width)[first].tolist()}, "
        f"not {wanted.reshape(-1, width)[first].tolist()}"
    )


def assert_reduced(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert equality of bits, or closeness over Gloo, which reduces in another order."""
    if BACKEND == "gloo" and actual.dtype.is_floating_point:
        slack = max(1e-5, 8 * torch.finfo(actual.dtype).eps)
        torch.testing.assert_close(
            actual, expected, rtol=slack, atol=slack * 4, msg=lambda text: f"{what}: {text}"
        )
    else:
        assert_same(actual, expected, what)
