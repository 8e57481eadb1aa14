"""One worker's model and its deltas to the weights in the boxes, cut into the layout's shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from torch_hbmcomm.parameter_server.exchange import Exchange
from torch_hbmcomm.parameter_server.layout import Shard
from torch_hbmcomm.parameter_server.packing import Span, packed_ranges, parts_of
from torch_hbmcomm.parameter_server.rules import Rule
from torch_hbmcomm.tensors import flat, is_finite

_OWN = ("base", "momentum", "rest")  # the parts of a worker's own state, as of _Part


class Model(Protocol):
    """Finds the tensors that a worker trains, in the layout's order."""

    def find(self, everything: bool = False) -> list[torch.Tensor]:
        """Return the tensors. Constants are empty tensors, unless `everything`."""


@dataclass(frozen=True)
class _Part:
    """The flat tensors of a shard, all of the shard's length.

    base: the weights taken last. delta, fresh: memory of the box (over shm), or this process's copy
    of it. rest: rounding errors of earlier deltas, if deltas are narrower than weights. momentum:
    of earlier deltas, at least as wide as float32, if the rule has it.
    """

    base: torch.Tensor
    delta: torch.Tensor
    fresh: torch.Tensor
    rest: torch.Tensor | None
    momentum: torch.Tensor | None


class Replica:
    """Computes deltas between a model and the weights, and applies fresh weights.

    model: its tensors are in the layout's order

    Threads: one at a time.
    """

    def __init__(
        self,
        model: Model,
        exchange: Exchange,
        rule: Rule,
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._weights = exchange.values
        self._layout = layout = exchange.values.layout
        self._rule = rule
        self._parts = {shard: self._part(shard) for shard in layout.changing}
        longest = max((shard.count for shard in layout.changing), default=0)
        self._scratch = torch.empty(longest)
        self._flat: list[torch.Tensor] = []

    # -- the box's weights, unrounded ------------------------------------------------------------

    def adopt(self, shards: Sequence[Shard]) -> None:
        """Copy the box's weights into the model, the bases and the fresh weights. Waits.

        Receives each shard once, also if take_ahead() follows, which needs the fresh weights.
        """
        self.locate(any(shard.kind == "constant" for shard in shards))
        for shard, memory in self._weights.read(shards):
            found = _view(memory, shard.dtype)
            part = self._parts.get(shard)  # None for a constant
            for local, at in self._locals(shard):
                local.copy_(found[at])
                if part is not None:
                    part.base[at].copy_(local)  # not found[at], which may have changed over shm
            if part is not None and not self._weights.memory.zero_copy[shard.box]:
                part.fresh.copy_(found)

    def read(self, tensors: Sequence[torch.Tensor], shards: Sequence[Shard]) -> None:
        """Read the box's weights into tensors like the model's. Waits."""
        flats = [flat(tensor) for tensor in tensors]
        for shard, memory in self._weights.read(shards):
            found = _view(memory, shard.dtype)
            for tensor, at in parts_of(shard.spans, flats):
                tensor.copy_(found[at])

    def give(self) -> None:
        """Write the model's tensors to the boxes, as the weights. Waits."""
        self.locate(everything=True)

        def values(shard: Shard) -> tuple[Shard, memoryview]:
            packed = torch.empty(shard.count, dtype=getattr(torch, shard.dtype))
            for local, at in self._locals(shard):
                packed[at].copy_(local)
            return shard, _bytes(packed)

        self._weights.write(map(values, self._layout.shards))

    # -- an exchange -----------------------------------------------------------------------------

    def locate(self, everything: bool = False) -> list[torch.Tensor]:
        """Find the model's memory, which moves with `parameter.data = ...`.

        Returns the model's tensors, of which constants are empty unless `everything`. Call it
        before the other methods of an exchange.

        Raises RuntimeError if the model is not as it was when the layout was made.
        """
        tensors = self._model.find(everything)
        self._flat = [flat(tensor) for tensor in tensors]
        return tensors

    def delta(self, shard: Shard, workers: int) -> torch.Tensor:
        """Compute the delta that would be sent: with the rounding errors of earlier deltas.

        Returns the delta buffer, or, if its dtype is narrower, memory that the next call
        overwrites.
        """
        part = self._parts[shard]
        if part.rest is None:
            return self._compute(shard, part, part.delta, workers)
        return self._compute(shard, part, self._scratch[: shard.count], workers).add_(part.rest)

    def fill_delta_buffer(self, shard: Shard, workers: int, momentum: bool) -> None:
        """Put a delta that is sent into its delta buffer, and keep the rounding error. A delta as
        wide as the weights has been put there by delta() already.

        momentum: True: step the momentum of the rule, if it has one, and add it to the delta

        REQUIRES: delta() of this shard was computed since the model changed.
        """
        part = self._parts[shard]
        delta = part.delta
        if part.rest is not None:
            delta = self._compute(shard, part, self._scratch[: shard.count], workers)
        if momentum and part.momentum is not None:
            part.momentum.mul_(self._rule.momentum).add_(delta)
            delta.add_(part.momentum, alpha=self._rule.momentum)
        if part.rest is not None:
            part.rest.add_(delta)
            part.delta.copy_(part.rest)
            part.rest.sub_(part.delta)

    def fill_delta_buffers_with_rest(self) -> list[Shard]:
        """Put the rounding errors of sent deltas into the delta buffers. Returns their shards.

        Keeps the errors that the narrow dtype rounds to 0.
        """
        left = []
        for shard, part in self._parts.items():
            if part.rest is not None and part.delta.copy_(part.rest).any():
                part.rest.sub_(part.delta)
                left.append(shard)
        return left

    def take(self, shard: Shard) -> None:
        """Apply fresh weights to a shard whose delta was sent."""
        part = self._parts[shard]
        for local, at in self._locals(shard):
            self._rule.take(local, part.base[at], part.fresh[at], part.delta[at])

    def take_ahead(self, shard: Shard, scale: float) -> None:
        """Apply fresh weights, and the delta in the delta buffer, before that delta is sent."""
        part = self._parts[shard]
        for local, at in self._locals(shard):
            self._rule.take_ahead(local, part.base[at], part.fresh[at], part.delta[at], scale)

    def depart(self, shard: Shard) -> None:
        """Begin the next delta now, while the present one is in flight."""
        part = self._parts[shard]
        for local, at in self._locals(shard):
            part.base[at].copy_(local)

    def take_unsent(self, shard: Shard) -> None:
        """Apply fresh weights to a shard whose delta continues to wait."""
        part = self._parts[shard]
        for local, at in self._locals(shard):
            self._rule.take_unsent(local, part.base[at], part.fresh[at])

    def copy_relative(self, into: Sequence[torch.Tensor], shares: Mapping[str, float]) -> None:
        """Copy base + share * (model - base) to tensors of one dimension, in the layout's order.

        shares: by the kind of the tensor
        """
        self.locate()
        for shard, part in self._parts.items():
            targets = parts_of(shard.spans, into)
            for (local, at), (target, _) in zip(self._locals(shard), targets, strict=True):
                torch.lerp(part.base[at], local, shares[shard.kind], out=target)

    def first_not_finite(self, shard: Shard, delta: torch.Tensor) -> str:
        """Name the first tensor of a shard whose delta has a NaN or an infinity."""
        for span, at in packed_ranges(shard.spans):
            if not delta[at].isfinite().all():
                return self._layout.tensors[span.tensor].name
        raise AssertionError("all elements are finite")

    # -- a worker's own state --------------------------------------------------------------------

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """Return copies of the bases, momenta and rounding errors. Each is a list of flat tensors,
        in the layout's order, of which constants and absent ones are empty."""
        found: dict[str, list[torch.Tensor]] = {}
        for name in _OWN:
            found[name] = flats = [torch.empty(0) for _ in self._layout.tensors]
            for span, part in self._own_parts(name):
                if not flats[span.tensor].numel():
                    count = self._layout.tensors[span.tensor].count
                    flats[span.tensor] = torch.empty(count, dtype=part.dtype)
                flats[span.tensor][span.start : span.stop].copy_(part)
        return found

    def load(self, state: Mapping[str, Sequence[torch.Tensor]], names: Collection[str]) -> None:
        """Load the parts of these names from a result of saved(), which may have been cut into
        other shards. Leaves absent ones as they are."""
        for name in names:
            for span, part in self._own_parts(name):
                if (values := state[name][span.tensor]).numel():
                    part.copy_(values[span.start : span.stop])

    # -- inside ----------------------------------------------------------------------------------

    def _own_parts(self, name: str) -> Iterator[tuple[Span, torch.Tensor]]:
        """Yield each span, and its part of the `name` of its shard."""
        for shard, part in self._parts.items():
            values: torch.Tensor | None = getattr(part, name)
            if values is not None:
                for span, at in packed_ranges(shard.spans):
                    yield span, values[at]

    def _compute(self, shard: Shard, part: _Part, out: torch.Tensor, workers: int) -> torch.Tensor:
        for local, at in self._locals(shard):
            self._rule.difference(local, part.base[at], part.fresh[at], out[at], workers)
        return out

    def _locals(self, shard: Shard) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the model's part of each span, and the part's range in the shard."""
        return parts_of(shard.spans, self._flat)

    def _part(self, shard: Shard) -> _Part:
        fresh, dtype = self._exchange.fresh(shard)
        base = torch.empty(shard.count, dtype=getattr(torch, shard.dtype))
        momentum = None
        if self._rule.momentum and shard.kind == "parameter":
            wide = torch.promote_types(base.dtype, torch.float32)
            momentum = torch.zeros(shard.count, dtype=wide)
        return _Part(
            base=base,
            delta=_view(self._exchange.delta_buffer(shard), shard.delta_dtype),
            fresh=_view(fresh, dtype),
            rest=None if shard.delta_dtype == shard.dtype else torch.zeros(shard.count),
            momentum=momentum,
        )


def model_tensors(model: nn.Module, shared_buffers: bool) -> list[tuple[str, torch.Tensor, str]]:
    """Return the name, tensor and kind (as in TensorSpec) of each parameter and buffer.

    A buffer with elements that are not finite, such as a causal mask, is a constant, because no
    delta could be added to it.

    Raises ValueError if no parameter requires a gradient.
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
