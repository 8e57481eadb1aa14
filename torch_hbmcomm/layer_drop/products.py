"""Products of matrices of which one is thin: a factor of a low-rank approximation."""

from __future__ import annotations

import torch

# Where torch.mm() is MKL's, oneDNN's product takes half the time if one matrix is thin.
_LINEAR = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    else None
)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right, of the same type and device. Fastest where left is contiguous; right may
    as well be transposed."""
    if _LINEAR is not None and left.is_cpu and left.dtype == torch.float32:
        found: torch.Tensor = _LINEAR(left, right.T, None, "none", [], "")
        return found
    return torch.mm(left, right)
