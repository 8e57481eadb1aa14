"""The meetings of OuterSteps over a process group: transfers of fragments, made of all_reduce."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.agreement import together
from torch_hbmcomm.groups import chosen_group
from torch_hbmcomm.optimizers import Optimizer, optimizers_with
from torch_hbmcomm.outer_steps.config import OuterConfig
from torch_hbmcomm.outer_steps.mean_delta import Part
from torch_hbmcomm.outer_steps.meetings import Meetings
from torch_hbmcomm.outer_steps.outer_model import OuterModel
from torch_hbmcomm.outer_steps.outer_weights import Fragment, OuterWeights, broadcast
from torch_hbmcomm.outer_steps.saved import offer_of
from torch_hbmcomm.outer_steps.transfer import Transfer

T = TypeVar("T")


class GroupMeetings(Meetings):
    """Meets the ranks of a group. The constructor, meet(), close() and load_state_dict() are
    collectives.

    Errors of the group are raised unchanged. The meeting is then not done: inner weights, outer
    weights and rounding errors are as they were.

    misplaced: arguments that only boxes have, which the constructor refuses
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: OuterConfig,
        process_group: dist.ProcessGroup | None,
        misplaced: Sequence[str],
    ) -> None:
        super().__init__(config)
        self._misplaced = misplaced
        self._group = chosen_group(process_group)
        self._agree(model, optimizer)
        self._transfer: Transfer | None = None
        broadcast(self._model.flats(), self._group, 0)
        self._outer = OuterWeights(self._model, config.fragments)

    def _agree(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Check the arguments, and that they are equal on all ranks."""

        def introduce() -> list[str]:
            if self._misplaced:
                raise ValueError(f"{', '.join(self._misplaced)} is for boxes: give box too")
            self._config.check(self._group.size())
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            optimizers_with(optimizer, trained, "OuterSteps")
            self._model = OuterModel(model, dist.get_process_group_ranks(self._group))
            self._model.spans(self._config.fragments)
            settings = [f"{name}={value!r}" for name, value in asdict(self._config).items()]
            return [*settings, f"{len(self._model.specs)} tensors", *map(str, self._model.specs)]

        introductions = together(self._group, introduce, "an OuterSteps")
        for rank, other in enumerate(introductions):
            for theirs, ours in zip(other, introductions[0], strict=False):
                if theirs != ours:
                    raise ValueError(
                        f"rank {rank} has {theirs}, rank 0 has {ours}: OuterSteps needs the same "
                        "on every rank"
                    )

    def advance(self) -> None:
        if self._transfer is None:
            return
        if self.steps - self._transfer.begun >= self._config.delay:
            self._finish()
        else:
            self._guarded(self._transfer.advance)

    def meet(self) -> None:
        self._finish()
        self._begin(lambda delta: Part.GIVES)
        if self._config.delay == 0:
            self._finish()

    def close(self, wait: bool) -> None:
        """Join the meetings of the other ranks until all have closed, whatever `wait` says."""
        self._finish()
        for _ in range(self._config.fragments):
            self._begin(lambda delta: Part.LAST if delta.any() else Part.PASSES)
            self._finish()
        self._begin(lambda delta: Part.DONE)
        while any(self._finish()):
            self._begin(lambda delta: Part.DONE)

    @contextmanager
    def lend(self) -> Iterator[None]:
        inner = self._model.copies()
        try:
            self._outer.adopt()
            yield
        finally:
            self._model.restore(inner)

    def state_dict(self) -> dict[str, Any]:
        """Wait for the fragment that is being sent, without applying it. If this raises an error of
        the group, the transfer is given up, and the next call succeeds."""
        moving = self._transfer
        return {
            "rank": self._group.rank(),
            "ranks": self._group.size(),
            "transfer": None if moving is None else self._guarded(moving.state_dict),
            **self._outer.state_dict(),
            **self.counts(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        counts = [len(one.weights) for one in self._outer.fragments]
        offers = together(self._group, lambda: offer_of(state, self._model.specs, counts))
        present = [one for one in offers if one is not None]
        if not present:
            raise ValueError("load_state_dict() was given None on every rank: no rank has a state")
        self._transfer = None
        most = max(one.meetings for one in present)
        places = [(present[0].begun, rank, len(offers)) for rank in range(len(offers))]
        same = [one and (one.begun, one.rank, one.ranks) for one in offers] == places
        kept = [one is not None and (same or one.meetings == most) for one in offers]
        if state is not None and kept[self._group.rank()]:
            self._outer.load_state_dict(state)
            self.set_counts(state)
            if same and state["transfer"] is not None:
                self._transfer = Transfer.of(state["transfer"])
        if not same:
            self._follow(kept)

    def _follow(self, kept: Sequence[bool]) -> None:
        """Take the outer weights of the first rank that has kept its state. Collective."""
        source = kept.index(True)
        self._outer.follow(self._group, source, kept[self._group.rank()])
        numbers = torch.tensor([self.steps, self.meetings, self.refused])
        broadcast([numbers], self._group, source)
        self.steps, self.meetings, self.refused = numbers.tolist()

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self, part_of: Callable[[torch.Tensor], Part]) -> None:
        """Begin the transfer of the next fragment. part_of: as of Transfer.begin()"""
        self._transfer = Transfer.begin(
            self._group, self._config, self._outer, self._next_fragment(), self.steps, part_of
        )

    def _finish(self) -> Sequence[int]:
        """Apply the transfer, if there is one. Returns the parts of the ranks."""
        if (transfer := self._transfer) is None:
            return ()
        rank, fragment = self._group.rank(), self._next_fragment()
        arrived = self._guarded(lambda: transfer.apply(rank, self._config, self._outer, fragment))
        self._transfer = None
        self.meetings += 1
        self.sent_bytes += arrived.sent_bytes
        self._count_refused(arrived.parts)
        return arrived.parts

    def _next_fragment(self) -> Fragment:
        return self._outer.fragments[self.meetings % len(self._outer.fragments)]

    def _guarded(self, act: Callable[[], T]) -> T:
        """Call act(). If it raises, give the transfer up: nothing has been applied."""
        try:
            return act()
        except Exception:
            self._transfer = None
            raise

    def _count_refused(self, parts: Sequence[int]) -> None:
        refused = [rank for rank, part in enumerate(parts) if part == Part.REFUSED]
        if refused and self.refused == 0:
            warnings.warn(
                f"the delta or a buffer of rank {refused[0]} is not finite, or too large to be "
                "added up: it is left out of the mean, and the rank takes the outer weights; later "
                "ones are counted without a warning",
                RuntimeWarning,
                stacklevel=6,  # the caller of OuterSteps.step()
            )
        self.refused += len(refused)
