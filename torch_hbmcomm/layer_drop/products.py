"""Products of a matrix with factors that have few rows."""

from __future__ import annotations

import torch

# oneDNN's product where PyTorch has it: torch.mm is MKL's, which takes up to twice as long for
# factors of few rows, and on processors that are not Intel's for all.
_LINEAR = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    else None
)


def times_transposed(factor: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return factor matrixᵀ, which has as few rows as the factor. The matrix may be a transposed
    one."""
    if _LINEAR is not None and factor.is_cpu and factor.dtype == torch.float32:
        found: torch.Tensor = _LINEAR(factor, matrix, None, "none", [], "")
        return found
    return torch.mm(factor, matrix.T)
