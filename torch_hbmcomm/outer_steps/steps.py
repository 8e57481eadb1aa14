"""OuterSteps: workers take steps of their own, and an outer optimizer moves the common weights.

Sources: algorithm 1 of Douillard et al. 2023, *DiLoCo: Distributed low-communication training of
language models*. Algorithm 2 of Douillard et al. 2025, *Streaming DiLoCo with overlapping
communication*. torchft's DiLoCo calls `every` sync_every, `delay` fragment_sync_delay and `alpha`
fragment_update_alpha.
"""

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
from torch_hbmcomm.outer_steps.outer_model import OuterModel
from torch_hbmcomm.outer_steps.outer_weights import Fragment, OuterWeights, broadcast
from torch_hbmcomm.outer_steps.saved import offer_of
from torch_hbmcomm.outer_steps.transfer import Transfer

T = TypeVar("T")


class OuterSteps:
    """Train on slow networks: meet the other workers once in many steps (DiLoCo).

        outer = hbmcomm.OuterSteps(model, optimizer, every=100)  # instead of DDP
        for batch, target in data:
            optimizer.zero_grad()
            loss(model(batch), target).backward()
            optimizer.step()
            outer.step()  # after each step of the optimizer
        outer.close()

    The optimizer steps this worker's model alone: the inner weights. Once in `every` steps the
    workers meet. They average their deltas, the inner weights minus the outer weights. An outer
    optimizer, SGD with Nesterov momentum, moves the outer weights by the mean delta. Then the inner
    weights of all workers are the outer weights. The state of the inner optimizer stays local.

    With `fragments` the parameters are cut into runs of equally many elements. The runs meet in
    turn, every / fragments steps apart, so a meeting sends that fraction of the bytes.

    With `delay` a fragment is sent during the next steps, and the result is applied that many steps
    later, or at the next meeting if it comes earlier. By default the steps since the meeting are
    then added to the new outer weights, so each step is in exactly one delta. With `alpha` the
    inner weights become alpha * inner + (1 - alpha) * outer weights, as in Streaming DiLoCo.

    With a `dtype` narrower than the parameters, each rank keeps the rounding errors of its delta,
    and adds them to its next delta. The sum of bfloat16 deltas is rounded once more within each
    node and between nodes; these errors are lost. Sums of int8 are exact: n ranks share the range,
    so each sends numbers up to 127 // n, with a scale for each 1,024 elements.

    At each meeting floating-point buffers (as of BatchNorm) take their mean over the workers,
    integer buffers their value on rank 0. Buffers are always sent as float64, all of them with each
    fragment. Frozen parameters, and buffers with elements that are not finite, stay as they are.

    If a worker's delta is not finite, it is left out of the mean, and the worker takes the outer
    weights. All ranks count it as "refused". A RuntimeWarning on each rank reports the first one.

    The workers meet after equally many calls of step(), one for each iteration. Call it also if a
    GradScaler skipped the optimizer's step; with gradient accumulation, once for each step of the
    optimizer. With every=None the program calls meet(): then each worker may take any number of
    steps between two meetings, and all deltas count alike in the mean. A worker that has no more
    data calls close(), which joins the others' meetings until all workers have closed.

    The constructor, meetings, close() and load_state_dict() are collectives. A meeting is made of
    all_reduce in `process_group`. Between two calls the group is free for other collectives, if all
    ranks are at the same step. Otherwise give the object a group of its own. The group's timeout
    must be longer than the fastest worker waits for the slowest one.

    Errors of the group (a dead rank, a timeout) are raised unchanged. The meeting is then not done:
    the inner and the outer weights are as they were, and the deltas wait. Form another group, make
    another OuterSteps and call its load_state_dict().

    Sharded parameters (FSDP2, tensor parallelism): each rank meets the ranks that have the same
    shard, for example those with the same local rank on other nodes.

    Threads: one.

    Args:
        model: a model on the CPU, with the same parameters and buffers on every rank; the
            constructor copies rank 0's
        optimizer: the inner optimizer, or several; together they have all trained parameters
        every: steps between two meetings of a fragment, a multiple of `fragments`; None: the
            program calls meet()
        outer_lr: learning rate of the outer optimizer
        momentum: Nesterov momentum of the outer optimizer. With 0, and outer_lr=1, the outer
            weights are the mean of the inner weights (federated averaging, local SGD)
        fragments: parts that meet in turn
        delay: steps during which a fragment is sent, at most every / fragments
        alpha: the part of the inner weights in the mix after a meeting, in [0, 1]; None: the outer
            weights plus the steps since the meeting
        dtype: the deltas on the wire: torch.float32, torch.bfloat16 or torch.int8; None: float64 if
            a parameter is, else float32
        process_group: the group of the workers, over any backend for CPUs; None: the default group

    Raises:
        ValueError: on every rank: models or arguments differ; the text names a rank.
        ValueError, TypeError: this rank's arguments or model are wrong. The group stays usable.
        RuntimeError: another rank's arguments or model are wrong; has that rank's text.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int | None,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = chosen_group(process_group)
        self._config = OuterConfig(every, outer_lr, momentum, fragments, delay, alpha, dtype)
        self._agree(model, optimizer)
        self._steps = self._meetings = self._refused = self._sent_bytes = 0
        self._transfer: Transfer | None = None
        self._closed = self._lent = False
        broadcast(self._model.flats(), self._group, 0)
        self._outer = OuterWeights(self._model, fragments)

    def _agree(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Check the arguments, and that they are equal on all ranks."""

        def introduce() -> list[str]:
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

    # -- training --------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a step of the inner optimizer, and meet if it is time.

        Raises RuntimeError after close(), within weights(), and if a tensor of the model has
        changed its shape, dtype or memory order.
        """
        self._check_works("step()")
        self._steps += 1
        if self._transfer is not None:
            if self._steps - self._transfer.begun >= self._config.delay:
                self._finish()
            else:
                self._guarded(self._transfer.advance)
        interval = self._config.interval
        if interval is not None and self._steps % interval == 0:
            self.meet()

    def meet(self) -> None:
        """Meet the other workers now, with the next fragment in turn. All workers call it.

        First applies the fragment that is being sent. Raises RuntimeError as step() does.
        """
        self._check_works("meet()")
        self._finish()
        self._begin(lambda delta: Part.GIVES)
        if self._config.delay == 0:
            self._finish()

    def close(self) -> None:
        """Give the steps since the last meetings, then join the meetings of the other workers until
        all have closed. Afterwards the model has the outer weights on every rank.

        If all deltas of a meeting are of closing workers, the outer weights move by their mean,
        without outer_lr and momentum. Rounding errors of a narrow `dtype` that remain are lost.
        """
        if self._closed:
            return
        self._check_works("close()")
        self._finish()
        self._closed = True
        for _ in range(self._config.fragments):
            self._begin(lambda delta: Part.LAST if delta.any() else Part.PASSES)
            self._finish()
        self._begin(lambda delta: Part.DONE)
        while any(self._finish()):
            self._begin(lambda delta: Part.DONE)

    def stats(self) -> dict[str, int]:
        """Return counters: steps, meetings (of one fragment each), refused (deltas of all ranks),
        and sent_bytes, which this rank has given to all_reduce."""
        names = ("steps", "meetings", "refused", "sent_bytes")
        return {name: getattr(self, f"_{name}") for name in names}

    # -- the outer weights -----------------------------------------------------------------------

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Put the outer weights and the buffers of the last meeting into the model, to evaluate or
        save it. At the end of the block, restore the inner weights. Not a collective.

        The outer weights lack a fragment that is being sent.
        """
        self._check_works("weights()", closed_too=False)
        inner = self._model.copies()
        self._lent = True
        try:
            self._outer.adopt()
            yield
        finally:
            self._lent = False
            self._model.restore(inner)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with the inner weights, for load_state_dict(). Every rank saves
        its own, between the same two meetings, and the state of its inner optimizer. Tensors are
        copies.

        Waits for the fragment that is being sent, without applying it. If this raises an error of
        the group, the transfer is given up, and the next call succeeds.
        """
        moving = self._transfer
        return {
            "rank": self._group.rank(),
            "ranks": self._group.size(),
            "transfer": None if moving is None else self._guarded(moving.state_dict),
            **self._outer.state_dict(),
            **self.stats(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a checkpoint. Collective.

        If each rank gives the state that it saved in a group of the same size, the training
        continues as if it had not been interrupted. All arguments may be new, except `fragments`.

        Otherwise the ranks have changed, for example because one has died. All take the outer
        weights of a rank that has applied most meetings. A rank whose state has as many meetings
        keeps its inner weights, so its steps since then count at the next meeting. Every other rank
        takes the outer weights. A transfer is given up, and its deltas wait for the next meeting.
        The steps since the last meeting and the rounding errors of a rank that is gone are lost.

        state: the result of state_dict(), or None on a rank that has none

        Raises:
            ValueError: the state is of another model or of other fragments, or no rank has a state
            TypeError: the state is no mapping
            RuntimeError: another rank cannot load its state; no rank has loaded anything
        """
        self._check_works("load_state_dict()")
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
            for name in self.stats():
                setattr(self, f"_{name}", state[name])
            if same and state["transfer"] is not None:
                self._transfer = Transfer.of(state["transfer"])
        if not same:
            self._follow(kept)

    def _follow(self, kept: Sequence[bool]) -> None:
        """Take the outer weights of the first rank that has kept its state. Collective."""
        source = kept.index(True)
        self._outer.follow(self._group, source, kept[self._group.rank()])
        numbers = torch.tensor([self._steps, self._meetings, self._refused])
        broadcast([numbers], self._group, source)
        self._steps, self._meetings, self._refused = numbers.tolist()

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self, part_of: Callable[[torch.Tensor], Part]) -> None:
        """Begin the transfer of the next fragment. part_of: as of Transfer.begin()"""
        self._transfer = Transfer.begin(
            self._group, self._config, self._outer, self._next_fragment(), self._steps, part_of
        )

    def _finish(self) -> Sequence[int]:
        """Apply the transfer, if there is one. Returns the parts of the ranks."""
        if (transfer := self._transfer) is None:
            return ()
        rank, fragment = self._group.rank(), self._next_fragment()
        arrived = self._guarded(lambda: transfer.apply(rank, self._config, self._outer, fragment))
        self._transfer = None
        self._meetings += 1
        self._sent_bytes += arrived.sent_bytes
        self._count_refused(arrived.parts)
        return arrived.parts

    def _next_fragment(self) -> Fragment:
        return self._outer.fragments[self._meetings % len(self._outer.fragments)]

    def _guarded(self, act: Callable[[], T]) -> T:
        """Call act(). If it raises, give the transfer up: nothing has been applied."""
        try:
            return act()
        except Exception:
            self._transfer = None
            raise

    def _count_refused(self, parts: Sequence[int]) -> None:
        refused = [rank for rank, part in enumerate(parts) if part == Part.REFUSED]
        if refused and self._refused == 0:
            warnings.warn(
                f"the delta or a buffer of rank {refused[0]} is not finite, or too large to be "
                "added up: it is left out of the mean, and the rank takes the outer weights; later "
                "ones are counted without a warning",
                RuntimeWarning,
                stacklevel=4,
            )
        self._refused += len(refused)

    def _check_works(self, method: str, closed_too: bool = True) -> None:
        if self._closed and closed_too:
            raise RuntimeError(f"{method} after close()")
        if self._lent:
            raise RuntimeError(
                f"{method} within weights(): the model has the outer weights; leave the block first"
            )
