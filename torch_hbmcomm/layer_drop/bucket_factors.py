"""The factors of one bucket's low-rank approximations, from the caches to the bucket."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_hbmcomm.layer_drop import passes, products
from torch_hbmcomm.layer_drop.buckets import BucketLayers
from torch_hbmcomm.layer_drop.cache import Cache
from torch_hbmcomm.layer_drop.low_rank import LowRankRule
from torch_hbmcomm.layer_drop.ranks import Matrix


class BucketFactors:
    """The factors of one bucket's matrices, each lot packed one after another, row by row.

    Average `lefts` over the ranks; then choose(), take_out(), average what that filled, restore().

    Args:
        cache: which has accumulated the bucket
        factor: what values are multiplied by on the wire

    lefts: M R' of all matrices of a rank above 0.
    """

    def __init__(
        self, rule: LowRankRule, layers: BucketLayers, cache: Cache, factor: float
    ) -> None:
        self._rule, self._layers, self._cache, self._factor = rule, layers, cache, factor
        self._matrices = {
            index: matrix
            for index, matrix in enumerate(layers.matrices)
            if matrix is not None and rule.rank(matrix) > 0
        }
        self._values = {index: self._cached(one) for index, one in self._matrices.items()}
        self._bases: dict[int, torch.Tensor] = {}  # L of those that were chosen
        self._copies: dict[int, torch.Tensor] = {}  # of caches; restore() writes over them
        self.lefts = torch.empty(
            sum(rule.rank(matrix) * matrix.rows for matrix in self._matrices.values()),
            dtype=layers.wire,
            device=layers.device,
        )
        values = list(self._values.values())
        directions = [
            rule.directions(matrix, one.dtype, one.device)
            for matrix, one in zip(self._matrices.values(), values, strict=True)
        ]
        with _as_type(self._split_lefts(), values) as lefts:
            products.find_lefts(values, lefts, directions, factor)

    def choose(self, indices: Collection[int]) -> None:
        """Leave out the parameters that are not in indices, and those whose left factor is not
        finite, as when it is too large for the wire."""
        finite = passes.finite(self.lefts)
        chosen = {
            index: left.to(torch.promote_types(left.dtype, torch.float32))
            for index, left in zip(self._matrices, self._split_lefts(), strict=True)
            if index in indices and (finite or left.isfinite().all())
        }
        self._bases = dict(zip(chosen, products.bases(list(chosen.values())), strict=True))

    @property
    def chosen(self) -> Collection[int]:
        return self._bases.keys()

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where the bucket has those that were chosen: from and up to which elements."""
        layers = self._layers
        return [
            (layers.begins[index], layers.begins[index] + layers.counts[index])
            for index in self._bases
        ]

    @property
    def bases(self) -> Iterator[tuple[Matrix, torch.Tensor]]:
        """L of those that were chosen."""
        return ((self._matrices[index], basis) for index, basis in self._bases.items())

    @property
    def numel(self) -> int:
        """The elements of all R that were chosen."""
        return sum(self._matrices[i].columns * left.shape[1] for i, left in self._bases.items())

    def take_out(self, wire: torch.Tensor) -> None:
        """Move w L Lᵀ M out of the caches, w Lᵀ M into the wire. What rounding to the type of the
        wire takes away stays cached."""
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
        for index, one in zip(self._bases, values, strict=True):
            matrix = self._matrices[index]
            cache = self._cache.accumulated(matrix.name)
            if one.data_ptr() != cache.data_ptr():
                matrix.write(one, cache)
                self._copies[index] = one

    def restore(self, wire: torch.Tensor, buffer: torch.Tensor, scale: float) -> bool:
        """Write w L Rᵀ into the bucket. Returns whether all of it is finite.

        scale: what the averages on the wire are multiplied by
        """
        finite = passes.finite(wire)
        rights = [
            right.to(left.dtype)
            for left, right in zip(self._bases.values(), self._split(wire), strict=True)
        ]
        begins, counts = self._layers.begins, self._layers.counts
        parts = [buffer[begins[i] : begins[i] + counts[i]] for i in self._bases]
        found = []
        for (index, left), part in zip(self._bases.items(), parts, strict=True):
            matrix = self._matrices[index]
            if part.dtype == left.dtype and not matrix.order:
                found.append(matrix.view(part))
            elif index in self._copies:
                found.append(self._copies[index].to(left.dtype))
            else:
                found.append(left.new_empty(matrix.rows, matrix.columns))
        products.set_matrices(found, list(self._bases.values()), rights)
        for index, part, values, right in zip(self._bases, parts, found, rights, strict=True):
            matrix = self._matrices[index]
            if values.data_ptr() != part.data_ptr():
                matrix.write(values, part)
            if finite:
                self._rule.keep(matrix, (right / (scale * self._rule.relaxation)).T)
        return finite

    def _cached(self, matrix: Matrix) -> torch.Tensor:
        values = matrix.view(self._cache.accumulated(matrix.name))
        return values.to(torch.promote_types(values.dtype, torch.float32))

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
    """Give tensors of the types of others, to be set in place of those that have another type."""
    given = [
        one if one.dtype == other.dtype else torch.empty_like(one, dtype=other.dtype)
        for one, other in zip(tensors, like, strict=True)
    ]
    yield given
    for one, other in zip(tensors, given, strict=True):
        if one is not other:
            one.copy_(other)
