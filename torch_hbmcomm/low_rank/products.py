"""Products of matrices with the narrow factors of their low-rank approximations, M ≈ L Rᵀ, and
orthonormal bases of the factors.

Lists have one contiguous tensor for every matrix, all of one dtype and device. Shapes: matrices
[rows, columns]; `lefts`, which are L, [rows, rank]; `rights`, which are Rᵀ, [rank, columns].
csrc/low_rank.h computes float32 in the CPU's memory, all matrices of a list in parallel. PyTorch
computes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torch_hbmcomm import native

Tensors = Sequence[torch.Tensor]


def find_lefts(matrices: Tensors, lefts: Tensors, rights: Tensors, factor: float) -> None:
    """Set each left = factor * matrix @ rightᵀ."""
    if _native(matrices):
        native.load().low_rank_find_lefts(matrices, lefts, rights, factor)
        return
    for matrix, left, right in _each(matrices, lefts, rights):
        torch.mm(matrix, right.T, out=left).mul_(factor)


def find_rights(matrices: Tensors, lefts: Tensors, rights: Tensors, factor: float) -> None:
    """Set each right = factor * leftᵀ @ matrix."""
    if _native(matrices):
        native.load().low_rank_find_rights(matrices, lefts, rights, factor)
        return
    for matrix, left, right in _each(matrices, lefts, rights):
        torch.mm(left.T, matrix, out=right).mul_(factor)


def set_matrices(matrices: Tensors, lefts: Tensors, rights: Tensors) -> None:
    """Set each matrix = left @ right."""
    if _native(matrices):
        native.load().low_rank_set_matrices(matrices, lefts, rights, 1.0)
        return
    for matrix, left, right in _each(matrices, lefts, rights):
        torch.mm(left, right, out=matrix)


def add_to_matrices(matrices: Tensors, lefts: Tensors, rights: Tensors, factor: float) -> None:
    """Add factor * left @ right to each matrix."""
    if _native(matrices):
        native.load().low_rank_add_to_matrices(matrices, lefts, rights, factor)
        return
    for matrix, left, right in _each(matrices, lefts, rights):
        matrix.addmm_(left, right, alpha=factor)


def bases(lefts: Tensors) -> Tensors:
    """Return orthonormal columns that span each left's columns, by Householder's reflections.

    The columns of a left may be linearly dependent. REQUIRES: each left is finite, with at most as
    many columns as rows.
    """
    if _native(lefts):
        # torch.linalg.qr() takes longer in a hook, and with MKL it has hung when several threads
        # called it together.
        found: Tensors = native.load().low_rank_bases(lefts)
        return found
    return [torch.linalg.qr(left).Q.contiguous() for left in lefts]


def normalize_rows(matrices: Tensors) -> None:
    """Divide each row by its norm; a row of zeros stays as it is.

    A row whose squares overflow float32 becomes zeros; a row whose squares underflow stays.
    """
    if _native(matrices):
        native.load().low_rank_normalize_rows(matrices)
        return
    for matrix in matrices:
        norms = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
        matrix.div_(norms.masked_fill_(norms == 0, 1))


def _native(tensors: Tensors) -> bool:
    return all(one.is_cpu and one.dtype == torch.float32 for one in tensors)


def _each(
    matrices: Tensors, lefts: Tensors, rights: Tensors
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return zip(matrices, lefts, rights, strict=True)
