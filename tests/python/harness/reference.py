"""Reductions in NumPy. The results of the tested backend must have the same bits.

The order is ((x0 op x1) op x2) ... by rank. Types narrower than float32 are reduced in float32 and
rounded once. Integers wrap, but their AVG is exact and truncated toward zero. PREMUL_SUM multiplies
the operands by the factor in their own type, before the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from harness.context import BACKEND
from harness.data import ALL_DTYPES, COMPLEX, FLOAT, FLOAT8, INTEGER

Array = np.ndarray[Any, Any]

_OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_ON_BOOL: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.logical_or,
    "max": np.logical_or,
    "product": np.logical_and,
    "min": np.logical_and,
}

OPERATORS = list(_OPERATORS)
PREMUL_FACTOR = 2.7


def operands_of(name: str) -> list[torch.dtype]:
    """Return the dtypes for which the operator has a meaning."""
    if name in ("band", "bor", "bxor"):
        return [torch.bool, *INTEGER]
    if name in ("min", "max"):
        return [torch.bool, *INTEGER, *FLOAT8, *FLOAT]
    if name == "product":
        return [torch.bool, *INTEGER, *FLOAT8, *FLOAT, *COMPLEX]
    if name == "sum":
        return [torch.bool, *INTEGER, *FLOAT8, *FLOAT, *COMPLEX]
    return [*INTEGER, *FLOAT8, *FLOAT, *COMPLEX]


def meaningless_for(name: str) -> list[torch.dtype]:
    return [dtype for dtype in ALL_DTYPES if dtype not in operands_of(name)]


def supported_operators() -> list[str]:
    return [op for op in OPERATORS if BACKEND != "gloo" or op not in ("avg", "premul_sum")]


def reduce_op(name: str) -> Any:
    """Return the torch operator of a lower-case name; PREMUL_FACTOR is premul_sum's factor."""
    if name == "premul_sum":
        return _make_nccl_premul_sum(PREMUL_FACTOR)
    return getattr(dist.ReduceOp, name.upper())


def reduced(inputs: Sequence[torch.Tensor], name: str, ranks: int | None = None) -> torch.Tensor:
    """Reduce every rank's input, given by rank.

    ranks: the divisor of a mean, if not the number of inputs.
    """
    dtype = inputs[0].dtype
    if dtype.is_complex:
        return _reduced_complex(inputs, name, ranks)
    if name == "premul_sum":
        inputs = [_scaled(tensor) for tensor in inputs]
    operands = [_wide(tensor) for tensor in inputs]
    if name == "avg" and operands[0].dtype.kind in "iu":
        return _narrow(_integer_mean(operands, ranks or len(inputs)), dtype)
    operator = _ON_BOOL.get(name) if dtype == torch.bool else None
    total = fold(operator or _OPERATORS[name], operands)
    if name == "avg":
        total = _divided(total, ranks or len(inputs))
    return _narrow(total, dtype)


def _wide(tensor: torch.Tensor) -> Array:
    narrow_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
    array: Array = (tensor.to(torch.float32) if narrow_float else tensor).contiguous().numpy()
    return array


def _narrow(array: Array, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point and dtype != torch.bool:
        array = array.astype(torch.empty(0, dtype=dtype).numpy().dtype)
    return torch.empty(array.shape, dtype=dtype).copy_(
        torch.from_numpy(np.ascontiguousarray(array))
    )


def _divided(total: Array, count: int) -> Array:
    ratio: Array = np.divide(total, total.dtype.type(count))
    return ratio


def _integer_mean(operands: Sequence[Array], count: int) -> Array:
    """Return the sum divided by `count`, truncated toward zero.

    It adds quotients and remainders, which stay within 64 bits.
    """
    wide = np.uint64 if operands[0].dtype.kind == "u" else np.int64
    parts = [np.divmod(x.astype(wide), wide(count)) for x in operands]
    rest = fold(np.add, [remainder for _, remainder in parts])
    floor: Array = fold(np.add, [quotient for quotient, _ in parts]) + rest // wide(count)
    mean: Array = floor + ((floor < 0) & (rest % wide(count) != 0)).astype(wide)
    return mean


def _scaled(tensor: torch.Tensor) -> torch.Tensor:
    array = _wide(tensor)
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        scaled = np.trunc(array.astype(np.float64) * PREMUL_FACTOR)
        return _narrow(np.clip(scaled, limits.min, limits.max), tensor.dtype)
    return _narrow(array * array.dtype.type(PREMUL_FACTOR), tensor.dtype)


def _reduced_complex(inputs: Sequence[torch.Tensor], name: str, ranks: int | None) -> torch.Tensor:
    parts = [torch.view_as_real(tensor).contiguous() for tensor in inputs]
    if name != "product":
        return torch.view_as_complex(reduced(parts, name, ranks))

    def product(a: Array, b: Array) -> Array:
        (ar, ai), (br, bi) = (np.moveaxis(x, -1, 0) for x in (a, b))
        return np.stack([ar * br - ai * bi, ar * bi + ai * br], axis=-1)

    total = fold(product, [_wide(part) for part in parts])
    return torch.view_as_complex(_narrow(total, parts[0].dtype))
