"""One worker's model beside the weights in the boxes, cut as the layout says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torch_hbmcomm.parameter_server.exchange import Exchange
from torch_hbmcomm.parameter_server.layout import Piece
from torch_hbmcomm.parameter_server.packing import parts_of, placed
from torch_hbmcomm.parameter_server.rules import Rule
from torch_hbmcomm.parameter_server.shared_model import SharedModel
from torch_hbmcomm.tensors import flat, is_finite


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


class Replica:
    """Computes differences between a model and the weights, and takes weights in.

    model: its tensors are in the layout's order

    Threads: one at a time.
    """

    def __init__(
        self,
        model: SharedModel,
        exchange: Exchange,
        rule: Rule,
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._weights = exchange.shards
        self._layout = layout = exchange.shards.layout
        self._rule = rule
        self._parts = {piece: self._part(piece) for piece in layout.changing}
        longest = max((piece.count for piece in layout.changing), default=0)
        self._scratch = torch.empty(longest)
        self._flat: list[torch.Tensor] = []

    # -- the box's weights, unrounded ------------------------------------------------------------

    def adopt(self, pieces: Sequence[Piece]) -> None:
        """Make the box's weights the model's. Waits."""
        self.read(self.locate(any(piece.kind == "constant" for piece in pieces)), pieces)
        for piece, part in self._parts.items():
            for local, at in self._locals(piece):
                part.base[at].copy_(local)

    def read(self, tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """Read the box's weights into tensors like the model's. Waits."""
        flats = [flat(tensor) for tensor in tensors]
        for piece in pieces:
            found = _view(self._weights.read(piece), piece.dtype)
            for tensor, at in parts_of(piece.spans, flats):
                tensor.copy_(found[at])

    def give(self) -> None:
        """Make the model's tensors the box's weights. Waits."""
        self.locate(everything=True)
        for piece in self._layout.pieces:
            values = torch.empty(piece.count, dtype=getattr(torch, piece.dtype))
            for local, at in self._locals(piece):
                values[at].copy_(local)
            self._weights.write(piece, _bytes(values))

    # -- an exchange -----------------------------------------------------------------------------

    def locate(self, everything: bool = False) -> list[torch.Tensor]:
        """Find the model's memory, which has moved after `parameter.data = ...`.

        Returns the model's tensors, of which constants are empty unless `everything`. Call it
        before the other methods of an exchange.

        Raises RuntimeError if the model is not as it was when the layout was made.
        """
        tensors = self._model.find(everything)
        self._flat = [flat(tensor) for tensor in tensors]
        return tensors

    def difference(self, piece: Piece, workers: int) -> torch.Tensor:
        """Compute what a piece would send, with what rounding left of earlier differences.

        It lies in the slot, or, where that is narrower, in memory that the next call overwrites.
        """
        part = self._parts[piece]
        if part.rest is None:
            return self._compute(piece, part, part.slot, workers)
        return self._compute(piece, part, self._scratch[: piece.count], workers).add_(part.rest)

    def fill_slot(self, piece: Piece, workers: int) -> None:
        """Put a difference that is sent into the slot, and keep what rounding leaves of it.

        REQUIRES: difference() of this piece was computed since the model changed.
        """
        part = self._parts[piece]
        if part.rest is not None:
            part.rest.add_(self._compute(piece, part, self._scratch[: piece.count], workers))
            part.slot.copy_(part.rest)
            part.rest.sub_(part.slot)

    def fill_slots_with_rest(self) -> list[Piece]:
        """Put into the slots what rounding left of differences that were sent, and return the
        pieces that have some; less than the narrow type can tell from 0 stays."""
        left = []
        for piece, part in self._parts.items():
            if part.rest is not None and part.slot.copy_(part.rest).any():
                part.rest.sub_(part.slot)
                left.append(piece)
        return left

    def take(self, piece: Piece) -> None:
        """Apply fresh weights to a piece whose difference was sent."""
        part = self._parts[piece]
        for local, at in self._locals(piece):
            self._rule.take(local, part.base[at], part.fresh[at], part.slot[at])

    def take_ahead(self, piece: Piece, scale: float) -> None:
        """Apply fresh weights, and the difference in the slot, which is about to be sent."""
        part = self._parts[piece]
        for local, at in self._locals(piece):
            self._rule.take_ahead(local, part.base[at], part.fresh[at], part.slot[at], scale)

    def take_unsent(self, piece: Piece) -> None:
        """Apply fresh weights to a piece whose difference goes on waiting."""
        part = self._parts[piece]
        for local, at in self._locals(piece):
            self._rule.take_unsent(local, part.base[at], part.fresh[at])

    def first_not_finite(self, piece: Piece, difference: torch.Tensor) -> str:
        """Name the first tensor of a piece whose difference has a NaN or an infinity."""
        for span, at in placed(piece.spans):
            if not difference[at].isfinite().all():
                return self._layout.tensors[span.tensor].name
        raise AssertionError("all elements are finite")

    # -- inside ----------------------------------------------------------------------------------

    def _compute(self, piece: Piece, part: _Part, out: torch.Tensor, workers: int) -> torch.Tensor:
        for local, at in self._locals(piece):
            self._rule.difference(local, part.base[at], part.fresh[at], out[at], workers)
        return out

    def _locals(self, piece: Piece) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the model's part of each span, and the part's place in the piece."""
        return parts_of(piece.spans, self._flat)

    def _part(self, piece: Piece) -> _Part:
        fresh, dtype = self._exchange.fresh(piece)
        return _Part(
            base=torch.empty(piece.count, dtype=getattr(torch, piece.dtype)),
            slot=_view(self._exchange.slot(piece), piece.slot_dtype),
            fresh=_view(fresh, dtype),
            rest=None if piece.slot_dtype == piece.dtype else torch.zeros(piece.count),
        )


def model_tensors(model: nn.Module, shared_buffers: bool) -> list[tuple[str, torch.Tensor, str]]:
    """Return names, tensors and kinds (of TensorSpec) of all that a model has.

    A buffer with elements that are not finite is a constant, as causal masks are: it has no
    differences that could be added.

    Raises ValueError where nothing is trained.
    """
    found: list[tuple[str, torch.Tensor, str]] = [
        (name, parameter, "parameter" if parameter.requires_grad else "constant")
        for name, parameter in model.named_parameters()
    ]
    found += [
        (name, buffer, "buffer" if shared_buffers and _is_averaged(buffer) else "constant")
        for name, buffer in model.named_buffers()
    ]
    if not any(kind == "parameter" for _, _, kind in found):
        raise ValueError("the model has no parameter that requires a gradient")
    return found


def _is_averaged(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and is_finite(buffer)


def _view(memory: memoryview, dtype: str) -> torch.Tensor:
    if not memory:
        return torch.empty(0, dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=getattr(torch, dtype))


def _bytes(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data
