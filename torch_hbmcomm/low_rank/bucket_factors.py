"""The factors of a bucket's low-rank approximations. They are computed from the residuals, and
their averages are multiplied into the bucket."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from torch_hbmcomm.error_feedback import passes
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.residuals import Residuals
from torch_hbmcomm.low_rank import products
from torch_hbmcomm.low_rank.ranks import Matrix, read_matrices, write_matrices
from torch_hbmcomm.low_rank.rule import LowRankRule


class BucketFactors:
    """The factors of one bucket's matrices, packed one after another, row by row.

    The caller averages `lefts` over the ranks, and calls choose() and take_out(). Then the caller
    averages the wire, and calls restore(). M, L, R, R' and w are as in rule.py.

    Args:
        residuals: this rank's residuals, to which the bucket's gradients have been added
        factor: the number by which the values on the wire are multiplied

    lefts: factor * M R' of all matrices of a rank above 0.
    """

    dtype: torch.dtype | None = None

    def __init__(
        self, rule: LowRankRule, layers: BucketLayers, residuals: Residuals, factor: float
    ) -> None:
        self._rule, self._layers = rule, layers
        self._residuals, self._factor = residuals, factor
        self._matrices = {
            index: matrix
            for index, matrix in enumerate(rule.matrices_in(layers))
            if matrix is not None and rule.rank(matrix) > 0
        }
        found = read_matrices(list(self._matrices.values()), self._accumulated(self._matrices))
        self._values = {
            index: one.to(torch.promote_types(one.dtype, torch.float32))
            for index, one in zip(self._matrices, found, strict=True)
        }
        self._bases: dict[int, torch.Tensor] = {}  # L of the chosen parameters
        self._copies: dict[int, torch.Tensor] = {}  # residuals as matrices; restore() reuses them
        self.lefts = torch.empty(
            sum(rule.rank(matrix) * matrix.rows for matrix in self._matrices.values()),
            dtype=layers.wire,
            device=layers.device,
        )
        values = list(self._values.values())
        directions = rule.directions(self._matrices.values(), values)
        with _as_type(self._split_lefts(), values) as lefts:
            products.find_lefts(values, lefts, directions, factor)

    def choose(self, indices: Collection[int]) -> None:
        """Choose the parameters in `indices`, except those whose left factor is not finite. A left
        factor is not finite if, for example, it is too large for the wire's dtype."""
        finite = passes.finite(self.lefts)
        chosen = {
            index: left.to(torch.promote_types(left.dtype, torch.float32))
            for index, left in zip(self._matrices, self._split_lefts(), strict=True)
            if index in indices and (finite or left.isfinite().all())
        }
        self._bases = dict(zip(chosen, products.bases(list(chosen.values())), strict=True))

    @property
    def parameters(self) -> Collection[int]:
        """The chosen parameters, by index in the bucket."""
        return self._bases.keys()

    @property
    def bases(self) -> Iterator[tuple[Matrix, torch.Tensor]]:
        """The chosen matrices, each with its L."""
        return ((self._matrices[index], basis) for index, basis in self._bases.items())

    @property
    def numel(self) -> int:
        """The number of elements of R, over all chosen parameters."""
        return sum(self._matrices[i].columns * left.shape[1] for i, left in self._bases.items())

    @property
    def elements(self) -> int:
        return self.numel

    def take_out(self, wire: torch.Tensor) -> None:
        """Subtract w L Lᵀ M from the residuals, and write factor * w Lᵀ M to the wire. The errors
        of rounding to the wire's dtype stay in the residuals."""
        factor = self._factor * self._rule.relaxation
        values = [self._values[index] for index in self._bases]
        lefts = [left.to(one.dtype) for left, one in zip(self._bases.values(), values, strict=True)]
        rights = self._split(wire)
        with _as_type(rights, values) as wide:
            products.find_rights(values, lefts, wide, factor)
        products.add_to_matrices(
            values,
            lefts,
            [right.to(one.dtype) for right, one in zip(rights, values, strict=True)],
            -1 / self._factor,
        )
        accumulated = dict(zip(self._bases, self._accumulated(self._bases), strict=True))
        self._copies = {
            index: one
            for index, one in zip(self._bases, values, strict=True)
            if one.data_ptr() != accumulated[index].data_ptr()
        }
        self._write(self._copies, accumulated)

    def restore(self, wire: torch.Tensor, buffer: torch.Tensor, scale: float) -> bool:
        """Write w L Rᵀ into the bucket. Returns True if all elements are finite.

        scale: the GradScaler's factor, by which the averages are multiplied
        """
        finite = passes.finite(wire)
        rights = [
            right.to(left.dtype)
            for left, right in zip(self._bases.values(), self._split(wire), strict=True)
        ]
        begins, counts = self._layers.begins, self._layers.counts
        parts = {i: buffer[begins[i] : begins[i] + counts[i]] for i in self._bases}
        found = {}
        for index, left in self._bases.items():
            matrix = self._matrices[index]
            if parts[index].dtype == left.dtype and not matrix.order:
                found[index] = matrix.ordered(parts[index])
            elif index in self._copies:
                found[index] = self._copies[index].to(left.dtype)
            else:
                found[index] = left.new_empty(matrix.rows, matrix.columns)
        products.set_matrices(list(found.values()), list(self._bases.values()), rights)
        apart = {i: one for i, one in found.items() if one.data_ptr() != parts[i].data_ptr()}
        self._write(apart, parts)
        if finite:
            next_rights = [right / (scale * self._rule.relaxation) for right in rights]
            self._rule.keep([self._matrices[index] for index in self._bases], next_rights)
        return finite

    def _accumulated(self, indices: Iterable[int]) -> list[torch.Tensor]:
        return [self._residuals.accumulated(self._matrices[index].name) for index in indices]

    def _write(
        self, matrices: Mapping[int, torch.Tensor], flats: Mapping[int, torch.Tensor]
    ) -> None:
        """Write each matrix over the flat tensor of the same index."""
        write_matrices(
            [self._matrices[index] for index in matrices],
            list(matrices.values()),
            [flats[index] for index in matrices],
        )

    def _split_lefts(self) -> list[torch.Tensor]:
        shapes = [(one.rows, self._rule.rank(one)) for one in self._matrices.values()]
        return _split(self.lefts, shapes)

    def _split(self, wire: torch.Tensor) -> list[torch.Tensor]:
        return _split(
            wire, [(left.shape[1], self._matrices[i].columns) for i, left in self._bases.items()]
        )


def _split(wire: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    parts = wire.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@contextmanager
def _as_type(
    tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Yield tensors for the block to fill, each in the dtype of its counterpart in `like`. A tensor
    of another dtype is replaced by a new tensor, which is copied back when the block ends."""
    given = [
        one if one.dtype == other.dtype else torch.empty_like(one, dtype=other.dtype)
        for one, other in zip(tensors, like, strict=True)
    ]
    yield given
    for one, other in zip(tensors, given, strict=True):
        if one is not other:
            one.copy_(other)
