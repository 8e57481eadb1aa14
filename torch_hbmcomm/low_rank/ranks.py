"""Chooses the ranks of low-rank approximations. The budget of bytes is given to the columns that
take most energy (squared norm) per byte out of the residuals.

Every rank of the group chooses the same, from numbers that are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from torch_hbmcomm.error_feedback import passes

_NEXT = 2 / 3
"""The energy expected of one more column, as a part of the last column's energy: each column takes
less than the one before. A part below 1 also keeps two layers of equal worth from exchanging a
column in every choice."""


@dataclass(frozen=True)
class Matrix:
    """A parameter's gradient as a matrix.

    width: bytes of an element on the wire.
    shape: the gradient's shape, with its dimensions in the order of memory; () if `order` is ().
    order: the dimensions of the rows, then the columns' dimensions; (): the order of memory.
    """

    name: str
    rows: int
    columns: int
    width: int
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the whole matrix."""
        return self.width * self.rows * self.columns

    @property
    def cost(self) -> int:
        """The bytes of one rank: a column of each factor."""
        return self.width * (self.rows + self.columns)

    @property
    def most(self) -> int:
        """The largest rank whose factors have fewer bytes than the matrix; 0: there is none."""
        return (self.rows * self.columns - 1) // (self.rows + self.columns)

    @property
    def block(self) -> tuple[int, int] | None:
        """The rows and columns of a block, if the matrix is the gradient with transposed blocks.

        None if `order` is another one. In a convolution's gradient, a block has the kernels of one
        output channel.
        """
        if self.order != (0, *range(2, len(self.shape)), 1):
            return None
        return self.shape[1], math.prod(self.shape[2:])

    def ordered(self, flat: torch.Tensor) -> torch.Tensor:
        """View the elements of a gradient in the order of the matrix."""
        if not self.order:
            return flat.view(self.rows, self.columns)
        return flat.view(self.shape).permute(self.order)


def read_matrices(matrices: Sequence[Matrix], flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each gradient as its matrix: a view, or a copy if the order of elements differs."""
    found = [
        flat.new_empty(matrix.rows, matrix.columns)
        if matrix.block
        else matrix.ordered(flat).reshape(matrix.rows, matrix.columns)
        for matrix, flat in zip(matrices, flats, strict=True)
    ]
    blocks = [
        (flat, values.view(-1), *matrix.block)
        for matrix, flat, values in zip(matrices, flats, found, strict=True)
        if matrix.block
    ]
    passes.transpose_blocks(blocks)
    return found


def write_matrices(
    matrices: Sequence[Matrix], values: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]
) -> None:
    """Write matrices over the elements of gradients. A matrix that is a view of its gradient has
    these elements already."""
    blocks = []
    for matrix, one, flat in zip(matrices, values, flats, strict=True):
        if matrix.block:
            rows, columns = matrix.block
            blocks.append((one.view(-1), flat, columns, rows))
        elif one.data_ptr() != flat.data_ptr():
            ordered = matrix.ordered(flat)
            ordered.copy_(one.view(ordered.shape))
    passes.transpose_blocks(blocks)


def matrix_of(name: str, shape: Sequence[int], width: int) -> Matrix | None:
    """Return a gradient of this shape as the matrix whose ranks cost least.

    Returns None if even rank 1 has no fewer bytes than the whole. Each dimension goes to the rows
    or to the columns, and the dimensions of the rows need not be adjacent. With a convolution's
    64 x 64 x 3 x 3, the rows have 64 x 3, and the columns have 64 x 3.

    shape: the dimensions in the order of memory
    """
    numel = math.prod(shape)
    if numel == 0:
        return None
    dimensions = range(len(shape))
    splits = []
    for count in dimensions[1:]:
        for others in combinations(dimensions[1:], count - 1):
            of_rows = 0, *others
            of_columns = [one for one in dimensions if one not in of_rows]
            rows = math.prod(shape[one] for one in of_rows)
            matrix = Matrix(name, rows, numel // rows, width)
            if [*of_rows, *of_columns] != [*dimensions]:
                of_columns.sort(key=lambda one: shape[one])  # the longest last, to copy fast
                matrix = replace(matrix, shape=tuple(shape), order=(*of_rows, *of_columns))
            splits.append(matrix)
    best = min(splits, key=lambda matrix: (matrix.cost, matrix.order != ()), default=None)
    return None if best is None or best.most < 1 else best


def first_ranks(matrices: Sequence[Matrix], budget: float) -> dict[str, int]:
    """Return a rank for each matrix: the largest common rank within a budget of bytes, or the
    matrix's `most` if that is less."""
    ranks = dict.fromkeys((matrix.name for matrix in matrices), 0)
    growing = list(matrices)
    while growing and sum(matrix.cost for matrix in growing) <= budget:
        for matrix in growing:
            ranks[matrix.name] += 1
            budget -= matrix.cost
        growing = [matrix for matrix in growing if ranks[matrix.name] < matrix.most]
    return ranks


def next_ranks(
    matrices: Sequence[Matrix],
    ranks: Mapping[str, int],
    energies: Mapping[str, float],
    budget: float,
) -> dict[str, int]:
    """Change each rank by at most one, so that all last columns approach the same energy per byte.

    Each matrix keeps its columns except the last. The rest of the budget pays for last columns and
    for additional ones, at most one for a matrix. First columns of matrices come before all other
    columns. Among first columns, and among the others, more energy per byte comes first. A matrix
    that gets rank 0 waits.

    Args:
        ranks: the ranks of the steps before. A missing matrix had rank 0, for example if the run
            that saved the checkpoint sent it whole
        energies: the squared norm that each matrix's last column took out of its residual. For rank
            0: the expected energy of a first column, or math.inf after too long a wait, which gives
            the matrix rank 1 even beyond the budget
        budget: bytes for the factors of all matrices together
    """
    planned: dict[str, int] = {}
    firsts: list[tuple[float, Matrix]] = []  # first columns of their matrices
    others: list[tuple[float, Matrix]] = []
    for matrix in matrices:
        rank = min(ranks.get(matrix.name, 0), matrix.most)
        planned[matrix.name] = max(rank - 1, 0)
        budget -= matrix.cost * planned[matrix.name]
        worth = energies[matrix.name] / matrix.cost
        (firsts if rank < 2 else others).append((worth, matrix))
        if 0 < rank < matrix.most:
            others.append((worth * _NEXT, matrix))
    for offers in (firsts, others):
        offers.sort(key=lambda offer: -offer[0])
    for worth, matrix in firsts + others:
        if matrix.cost <= budget or worth == math.inf:
            planned[matrix.name] += 1
            budget -= matrix.cost
    return planned
