"""Products of matrices of which one is thin: a factor of a low-rank approximation."""

from __future__ import annotations

from typing import Any

import torch

_SCHEMA = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
    "str? algorithm) -> Tensor Y"
)


def _linear() -> Any:
    """Return oneDNN's product, which takes half the time of MKL's if one matrix is thin; None where
    torch.mm() is not MKL's, or where PyTorch, to which this operator is its own affair, has it no
    more as it was."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return None
    linear = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
    return linear if str(getattr(linear, "_schema", "")) == _SCHEMA else None


_LINEAR = _linear()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right, of the same type and device. Fastest where left is contiguous; right may
    as well be transposed."""
    if _LINEAR is not None and left.is_cpu and left.dtype == torch.float32:
        found: torch.Tensor = _LINEAR(left, right.T, None, "none", [], "")
        return found
    return torch.mm(left, right)


def product_into(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Set found = left @ right, all of one type, where the sum in each element is short. The zeros
    bring `found` into the processor's cache, where addmm_() is faster than mm() from memory."""
    found.zero_().addmm_(left, right)
