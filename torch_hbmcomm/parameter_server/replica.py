"""One worker's model beside the weights in the boxes, cut as the layout says.

Threads: one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_hbmcomm.parameter_server.layout import Layout, Piece
from torch_hbmcomm.parameter_server.rules import Rule
from torch_hbmcomm.parameter_server.shards import Shards
from torch_hbmcomm.parameter_server.tensors import flat


@dataclass(frozen=True)
class _Part:
    """A piece's tensors of one dimension and equal length.

    base: what was taken in last. slot, fresh: in the box, or this process's copy. rest: what the
    narrower slot could not carry yet.
    """

    base: torch.Tensor
    slot: torch.Tensor
    fresh: torch.Tensor
    rest: torch.Tensor | None


class NotFiniteError(ArithmeticError):
    """Its text is the name of a tensor whose difference has a NaN or an infinity."""


class Replica:
    """tensors: of the model, in the layout's order."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], layout: Layout, shards: Shards, rule: Rule
    ) -> None:
        self._tensors = tensors
        self._layout = layout
        self._shards = shards
        self._rule = rule
        self._parts = {piece: self._part(piece) for piece in layout.changing}
        longest = max((piece.count for piece in layout.changing), default=0)
        self._scratch = torch.empty(longest)
        self._flat: list[torch.Tensor] = []

    def adopt(self, pieces: Sequence[Piece]) -> None:
        """The box's weights, unrounded, become the model's."""
        self._find_tensors()
        self.read(self._tensors, pieces)
        for piece, part in self._parts.items():
            for local, at in self._locals(piece):
                part.base[at].copy_(local)

    def read(self, tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """The box's weights, unrounded, into tensors like the model's."""
        flats = [flat(tensor) for tensor in tensors]
        for piece in pieces:
            found = _view(self._shards.read(piece), piece.dtype)
            for span in piece.spans:
                local = flats[span.tensor][span.begin : span.begin + span.count]
                local.copy_(found[span.at : span.at + span.count])

    def give(self) -> None:
        """The model's tensors become the box's weights."""
        self._find_tensors()
        for piece in self._layout.pieces:
            values = torch.empty(piece.count, dtype=getattr(torch, piece.dtype))
            for local, at in self._locals(piece):
                values[at].copy_(local)
            self._shards.write(piece, _bytes(values))

    def offer(
        self,
        workers: int,
        weigh: Callable[[torch.Tensor], float],
        choose: Callable[[Sequence[float]], Sequence[Piece]],
    ) -> Sequence[Piece]:
        """Puts the differences of the pieces that are chosen into their slots.

        Args:
            weigh: a difference, with what was left of earlier ones; NaN if it is not finite
            choose: given these weights, says what is sent, and is returned

        Raises NotFiniteError; then nothing may be sent, and what was left is as before.
        """
        self._find_tensors()
        chosen = choose([self._weight(*one, workers, weigh) for one in self._parts.items()])
        for piece in chosen:
            part = self._parts[piece]
            if part.rest is not None:
                difference = self._scratch[: piece.count]
                self._difference(piece, part, difference, workers)
                part.rest.add_(difference)
                part.slot.copy_(part.rest)
                part.rest.sub_(part.slot)
        return chosen

    def take(self, piece: Piece) -> None:
        """Of a piece that was sent, as take_ahead()."""
        part = self._parts[piece]
        for local, at in self._locals(piece):
            self._rule.take(local, part.base[at], part.fresh[at], part.slot[at])

    def take_unsent(self, piece: Piece) -> None:
        part = self._parts[piece]
        for local, at in self._locals(piece):
            self._rule.take_unsent(local, part.base[at], part.fresh[at])

    def take_ahead(self, piece: Piece, scale: float) -> None:
        part = self._parts[piece]
        for local, at in self._locals(piece):
            self._rule.take_ahead(local, part.base[at], part.fresh[at], part.slot[at], scale)

    def offer_rest(self) -> list[Piece]:
        """Puts into the slots what was left of differences that were sent, and returns the pieces
        that have some; less than the narrow type can tell from 0 stays."""
        left = []
        for piece, part in self._parts.items():
            if part.rest is not None and part.slot.copy_(part.rest).any():
                part.rest.sub_(part.slot)
                left.append(piece)
        return left

    def _difference(self, piece: Piece, part: _Part, out: torch.Tensor, workers: int) -> None:
        for local, at in self._locals(piece):
            self._rule.difference(local, part.base[at], part.fresh[at], out[at], workers)

    def _weight(
        self, piece: Piece, part: _Part, workers: int, weigh: Callable[[torch.Tensor], float]
    ) -> float:
        out = part.slot if part.rest is None else self._scratch[: piece.count]
        self._difference(piece, part, out, workers)
        if part.rest is not None:
            out.add_(part.rest)
        weight = weigh(out)
        if math.isnan(weight):
            raise NotFiniteError(self._first_not_finite(piece, out))
        return weight

    def _first_not_finite(self, piece: Piece, difference: torch.Tensor) -> str:
        for span in piece.spans:
            if not difference[span.at : span.at + span.count].isfinite().all():
                return self._layout.tensors[span.tensor].name
        raise AssertionError("all elements are finite")

    def _find_tensors(self) -> None:
        """A parameter's memory is another one after `parameter.data = ...`.

        Raises RuntimeError for one that was frozen when the layout was made, and is trained now.
        """
        for tensor, described in zip(self._tensors, self._layout.tensors, strict=True):
            if tensor.requires_grad and described.kind == "constant":
                raise RuntimeError(
                    f"parameter {described.name} was frozen when the ParameterServer was made, and "
                    "now requires a gradient: make it after unfreezing, on every worker"
                )
        self._flat = [flat(tensor) for tensor in self._tensors]

    def _locals(self, piece: Piece) -> Iterator[tuple[torch.Tensor, slice]]:
        """The model's part of each span, and where that lies in the piece."""
        for span in piece.spans:
            local = self._flat[span.tensor][span.begin : span.begin + span.count]
            yield local, slice(span.at, span.at + span.count)

    def _part(self, piece: Piece) -> _Part:
        fresh, dtype = self._shards.fresh(piece)
        return _Part(
            base=torch.empty(piece.count, dtype=getattr(torch, piece.dtype)),
            slot=_view(self._shards.slot(piece), piece.slot_dtype),
            fresh=_view(fresh, dtype),
            rest=None if piece.slot_dtype == piece.dtype else torch.zeros(piece.count),
        )


def _view(memory: memoryview, dtype: str) -> torch.Tensor:
    if not memory:
        return torch.empty(0, dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=getattr(torch, dtype))


def _bytes(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data
