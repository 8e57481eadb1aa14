"""The outer weights, in fragments, and the averaged buffers.

The trained parameters are cut into runs of equally many elements, in the model's order. A run is a
fragment. It may begin and end within a tensor, because the outer optimizer treats each element by
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_hbmcomm.outer_steps.outer_model import OuterModel
from torch_hbmcomm.parameter_server.packing import Span, parts_of


class Fragment:
    """A part of the outer weights, with its part of the outer optimizer's state.

    weights: the outer weights, equal on all ranks. momentum: equal on all ranks. residual: this
    rank's rounding errors, which its next delta includes; None: zeros. All are flat.
    """

    def __init__(self, spans: tuple[Span, ...], model: OuterModel) -> None:
        self.spans = spans
        count = sum(span.length for span in spans)
        self.weights = torch.empty(count, dtype=model.wide)
        self.momentum = torch.zeros_like(self.weights)
        self.residual: torch.Tensor | None = None
        for local, at in parts_of(spans, model.flats("parameter")):
            self.weights[at].copy_(local)

    def inner(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of the inner weights."""
        found = torch.empty_like(self.weights)
        for local, at in parts_of(self.spans, flats):
            found[at].copy_(local)
        return found

    def delta(self, flats: Sequence[torch.Tensor], inner: torch.Tensor) -> torch.Tensor:
        """Return the inner weights minus the outer weights, which are rounded as the parameters
        are. With the minus sign of the paper it is the outer gradient."""
        found = inner.clone()
        for local, at in parts_of(self.spans, flats):
            found[at].sub_(self.weights[at].to(local.dtype))
        return found

    def step(self, mean: torch.Tensor, outer_lr: float, momentum: float) -> None:
        """Move the outer weights by the mean delta: torch.optim.SGD's step with nesterov=True, for
        the gradient -mean."""
        self.momentum.mul_(momentum).add_(mean)
        self.weights.add_(mean.add(self.momentum, alpha=momentum), alpha=outer_lr)

    def adopt(
        self, flats: Sequence[torch.Tensor], inner: torch.Tensor | None, alpha: float | None
    ) -> None:
        """Give the parameters the outer weights, and their own change since the transfer began.

        inner: the inner weights when the transfer began; None: forget the later steps
        alpha: the part of the inner weights in the mix; None: add the later steps instead
        """
        for local, at in parts_of(self.spans, flats):
            weights = self.weights[at]
            if inner is None:
                local.copy_(weights)
            elif alpha is None:
                local.copy_(weights + (local - inner[at]))
            else:
                local.copy_(torch.lerp(weights, local.to(weights.dtype), alpha))


class OuterWeights:
    """The weights and buffers on which the ranks agree, and their copies to and from the model.

    fragments: in the model's order. buffers, counters: flat, in float64 and int64. Everything is
    equal on all ranks, except the residuals.
    """

    def __init__(self, model: OuterModel, fragments: int) -> None:
        self.model = model
        self.fragments = [Fragment(spans, model) for spans in model.spans(fragments)]
        self.buffers, self.counters = self.local_buffers()

    def local_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of this rank's buffers, in float64, and of its counters, in int64."""
        return (
            _joined(self.model.flats("buffer"), torch.float64),
            _joined(self.model.flats("counter"), torch.int64),
        )

    def adopt(self) -> None:
        """Put the outer weights and the buffers into the model."""
        flats = self.model.flats("parameter")
        for fragment in self.fragments:
            fragment.adopt(flats, None, None)
        self.adopt_buffers()

    def adopt_buffers(self) -> None:
        """Put the buffers and the counters into the model."""
        for kind, values in (("buffer", self.buffers), ("counter", self.counters)):
            for tensor, part in _pairs(self.model.flats(kind), values):
                tensor.copy_(part)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything, with the inner weights and the residuals of this rank."""
        names = ("weights", "momentum", "residual")
        return {
            "tensors": [str(spec) for spec in self.model.specs],
            "model": self.model.copies(),
            "fragments": [
                {name: cloned(getattr(one, name)) for name in names} for one in self.fragments
            ],
            "buffers": self.buffers.clone(),
            "counters": self.counters.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that offer_of() has checked."""
        self.model.restore(state["model"])
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.weights.copy_(saved["weights"])
            fragment.momentum.copy_(saved["momentum"])
            fragment.residual = cloned(saved["residual"])
        self.buffers.copy_(state["buffers"])
        self.counters.copy_(state["counters"])

    def follow(self, group: dist.ProcessGroup, source: int, keeps: bool) -> None:
        """Take the outer weights of a rank, and its model. Collective.

        keeps: this rank keeps its own inner weights, buffers and residuals
        """
        own = self.model.copies() if keeps else None
        common = [part for one in self.fragments for part in (one.weights, one.momentum)]
        broadcast([*self.model.flats(), *common, self.buffers, self.counters], group, source)
        if own is not None:
            self.model.restore(own)
            return
        for fragment in self.fragments:
            fragment.residual = None
        self.adopt()


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Copy the tensors of a rank of the group to all its ranks."""
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)


def cloned(value: Any) -> Any:
    """Return a copy of a tensor, and any other value as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _joined(flats: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *(one.to(dtype) for one in flats)])


def _pairs(
    flats: Iterable[torch.Tensor], values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each flat tensor with its part of `values`, which has their elements in a row."""
    at = 0
    for one in flats:
        yield one, values[at : at + one.numel()]
        at += one.numel()
