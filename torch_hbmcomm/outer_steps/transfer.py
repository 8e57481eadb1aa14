"""A fragment in transfer, from the rank's own part in the meeting to the new outer weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_hbmcomm.outer_steps.config import OuterConfig
from torch_hbmcomm.outer_steps.mean_delta import Arrived, MeanDelta, Part
from torch_hbmcomm.outer_steps.outer_weights import Fragment, OuterWeights, cloned


@dataclass
class Transfer:
    """A transfer that has begun.

    begun: steps of this rank when it began
    inner: the fragment's inner weights then, flat
    averaging: None for a transfer of a checkpoint, which has arrived
    """

    begun: int
    inner: torch.Tensor
    averaging: MeanDelta | None
    arrived: Arrived | None = None

    @staticmethod
    def begin(
        group: dist.ProcessGroup,
        config: OuterConfig,
        outer: OuterWeights,
        fragment: Fragment,
        steps: int,
        part_of: Callable[[torch.Tensor], Part],
    ) -> Transfer:
        """Begin to send this rank's delta.

        part_of: returns this rank's part for a delta, which is refused if it is not finite
        """
        flats = outer.model.flats("parameter")
        inner = fragment.inner(flats)
        delta = fragment.delta(flats, inner)
        values = delta if fragment.residual is None else delta + fragment.residual
        buffers, counters = outer.local_buffers()
        wire = config.dtype or values.dtype
        # Deltas so large that their sum may overflow are refused like infinities.
        bound = torch.finfo(values.dtype if wire == torch.int8 else wire).max / (2 * group.size())
        finite = values.abs().max() <= bound and buffers.isfinite().all()
        part = part_of(delta)
        if part.counts and not finite:
            part = Part.REFUSED
        levels = config.levels(group.size())
        averaging = MeanDelta(group, part, values, wire, levels, buffers, counters)
        return Transfer(steps, inner, averaging)

    def advance(self) -> None:
        """Begin the part of the transfer that needs an answer of all ranks, if there is one."""
        if self.averaging is not None:
            self.averaging.advance()

    def wait(self) -> Arrived:
        """Return the result. Raises the errors of the group."""
        if self.arrived is None:
            assert self.averaging is not None
            self.arrived = self.averaging.wait()
        return self.arrived

    def apply(
        self, rank: int, config: OuterConfig, outer: OuterWeights, fragment: Fragment
    ) -> Arrived:
        """Wait, and move the outer weights and the model. If it raises, nothing has changed.

        rank: this process's rank in the group
        """
        arrived = self.wait()
        flats = outer.model.flats("parameter")
        if arrived.mean is not None:
            if Part.GIVES in arrived.parts:
                fragment.step(arrived.mean, config.outer_lr, config.momentum)
            else:
                fragment.weights.add_(arrived.mean)
            outer.buffers = arrived.buffers
        outer.counters = arrived.counters
        own = Part(arrived.parts[rank])
        if own.counts:
            fragment.residual = arrived.rest
        fragment.adopt(flats, self.inner if own == Part.GIVES else None, config.alpha)
        outer.adopt_buffers()
        return arrived

    def state_dict(self) -> dict[str, Any]:
        """Wait, and return copies of everything."""
        arrived = self.wait()
        parts = [int(part) for part in arrived.parts]
        state = {"begun": self.begun, "inner": self.inner} | arrived._asdict() | {"parts": parts}
        return {name: cloned(value) for name, value in state.items()}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Transfer:
        """Return the transfer of a state, which has arrived."""
        values = {name: cloned(value) for name, value in state.items()}
        begun, inner = values.pop("begun"), values.pop("inner")
        return Transfer(begun, inner, None, Arrived(**values))
