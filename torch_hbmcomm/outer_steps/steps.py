"""OuterSteps: workers take steps of their own, and an outer optimizer moves the common weights.

Sources: algorithm 1 of Douillard et al. 2023, *DiLoCo: Distributed low-communication training of
language models*. Algorithm 2 of Douillard et al. 2025, *Streaming DiLoCo with overlapping
communication*. torchft's DiLoCo calls `every` sync_every, `delay` fragment_sync_delay and `alpha`
fragment_update_alpha. Over boxes: Liu et al. 2024, *Asynchronous local-SGD training for language
modeling*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.optimizers import Optimizer
from torch_hbmcomm.outer_steps.box_meetings import BoxMeetings
from torch_hbmcomm.outer_steps.config import OuterConfig
from torch_hbmcomm.outer_steps.group_meetings import GroupMeetings
from torch_hbmcomm.outer_steps.meetings import Meetings
from torch_hbmcomm.parameter_server.sharding import Boxes

_BOX_DEFAULTS = {"name": "outer-steps", "workers": 1, "keep": False, "timeout": 300.0}


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

    Over a process group the workers meet together, by all_reduce. Over memory boxes (`box`) each
    worker meets the outer weights in the boxes alone, whenever it has taken its steps. No worker
    waits for another one, workers may die, and new ones may join. An arriving worker moves the
    outer weights by outer_lr / N times its delta with momentum, and takes them, where N is the
    number of live workers. It keeps the momentum of its own deltas.

    With `fragments` the parameters are cut into runs of equally many elements. The runs meet in
    turn, every / fragments steps apart, so a meeting sends that fraction of the bytes.

    With `delay` a fragment is sent during the next steps, and the result is applied that many steps
    later, or at the next meeting if it comes earlier. By default the steps since the meeting are
    then added to the new outer weights, so each step is in exactly one delta. With `alpha` the
    inner weights become alpha * inner + (1 - alpha) * outer weights, as in Streaming DiLoCo.

    With a `dtype` narrower than the parameters, each worker keeps the rounding errors of its delta,
    and adds them to its next delta. Over a process group the sum of bfloat16 deltas is rounded once
    more within each node and between nodes; these errors are lost. Sums of int8 are exact: n ranks
    share the range, so each sends numbers up to 127 // n, with a scale for each 1,024 elements.

    At each meeting floating-point buffers (as of BatchNorm) take their mean over the workers,
    integer buffers their value on rank 0. Buffers are always sent as float64, all of them with each
    fragment. Frozen parameters, and buffers with elements that are not finite, stay as they are.
    Over boxes a worker moves the common buffers by 1 / N times their change, in their own type, and
    integer buffers stay each worker's own.

    If a worker's delta is not finite, it is left out of the mean, and the worker takes the outer
    weights. All ranks count it as "refused"; over boxes, only this worker. A RuntimeWarning reports
    the first one.

    The workers of a group meet after equally many calls of step(), one for each iteration. Call it
    also if a GradScaler skipped the optimizer's step; with gradient accumulation, once for each
    step of the optimizer. With every=None the program calls meet(): then each worker may take any
    number of steps between two meetings, and all deltas count alike in the mean. A worker that has
    no more data calls close(), which joins the others' meetings until all workers have closed.

    Over a process group the constructor, meetings, close() and load_state_dict() are collectives. A
    meeting is made of all_reduce in `process_group`. Between two calls the group is free for other
    collectives, if all ranks are at the same step. Otherwise give the object a group of its own.
    The group's timeout must be longer than the fastest worker waits for the slowest one.

    Errors of the group (a dead rank, a timeout) are raised unchanged. The meeting is then not done:
    the inner and the outer weights are as they were, and the deltas wait. Form another group, make
    another OuterSteps and call its load_state_dict(). After an error of a box in a meeting the
    object can only be closed.

    Sharded parameters (FSDP2, tensor parallelism): each rank meets the ranks that have the same
    shard, for example those with the same local rank on other nodes. Over boxes they are refused.

    Threads: one. Over boxes, with `delay`, a thread of its own runs the exchanges.

    Args:
        model: a model on the CPU, with the same parameters and buffers on every worker. Workers of
            a group get rank 0's at the start. Over boxes the first worker's become the outer
            weights, and every later worker takes those that it finds.
        optimizer: the inner optimizer, or several; together they have all trained parameters
        every: steps between two meetings of a fragment, a multiple of `fragments`; None: the
            program calls meet(). Over boxes each worker may have its own.
        outer_lr: learning rate of the outer optimizer
        momentum: Nesterov momentum of the outer optimizer. A delta moves the outer weights for
            about 1 / (1 - momentum) meetings, in total by outer_lr / (1 - momentum) times itself.
            The DiLoCo paper takes 0.9, for more than a hundred meetings. With 0, and outer_lr=1,
            the outer weights are the mean of the inner weights (federated averaging, local SGD)
        fragments: parts that meet in turn
        delay: steps during which a fragment is sent, at most every / fragments
        alpha: the part of the inner weights in the mix after a meeting, in [0, 1]; None: the outer
            weights plus the steps since the meeting
        dtype: the deltas on the wire: torch.float32, torch.bfloat16 or torch.int8; over boxes
            torch.bfloat16 alone; None: float64 if a parameter is, else float32 (over boxes, each
            parameter's own)
        process_group: the group of the workers, over any backend for CPUs; None: the default group
        box: addresses or connections of the boxes that have the outer weights, the same for all
            workers in the same order; None: the workers meet over the process group
        name: this job's name in the boxes; workers of one name train one model
        workers: the number of workers to wait for in the constructor, and in load_state_dict(), if
            box is given
        keep: True: the outer weights stay in the boxes when the last worker leaves
        timeout: seconds to wait for other workers, if box is given

    Raises:
        ValueError: models or arguments differ; over a group on every rank, and the text names one
        ValueError, TypeError: this worker's arguments or model are wrong. Nothing has moved.
        RuntimeError: another rank's arguments or model are wrong; has that rank's text. Or all
            other workers of the boxes left while this one joined.
        MemoryError: a box is too small.
        TimeoutError: other workers did not come within `timeout`.
        smb.BoxError: an error of a box
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int | None,
        outer_lr: float = 0.7,
        momentum: float = 0.5,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        box: Boxes | None = None,
        name: str = "outer-steps",
        workers: int = 1,
        keep: bool = False,
        timeout: float = 300.0,
    ) -> None:
        self._closed = self._lent = False
        config = OuterConfig(every, outer_lr, momentum, fragments, delay, alpha, dtype)
        self._meetings: Meetings
        if box is None:
            given = {"name": name, "workers": workers, "keep": keep, "timeout": timeout}
            misplaced = [
                f"{key}={value!r}" for key, value in given.items() if value != _BOX_DEFAULTS[key]
            ]
            self._meetings = GroupMeetings(model, optimizer, config, process_group, misplaced)
        elif process_group is not None:
            raise ValueError("give box, or process_group, not both: workers meet in one place")
        else:
            self._meetings = BoxMeetings(
                model, optimizer, config, box, name, workers, keep, timeout
            )

    # -- training --------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a step of the inner optimizer, and meet if it is time.

        Raises RuntimeError after close(), within weights(), and if a tensor of the model has
        changed its shape, dtype or memory order.
        """
        self._check_works("step()")
        self._meetings.step()

    def meet(self) -> None:
        """Meet the other workers now, with the next fragment in turn. All workers of a group call
        it; over boxes, any worker at any time.

        First applies the fragment that is being sent. Raises RuntimeError as step() does.
        """
        self._check_works("meet()")
        self._meetings.meet()

    def close(self, wait: bool = False) -> None:
        """Give the steps since the last meetings, and leave.

        Over a process group, join the meetings of the other workers until all have closed.
        Afterwards the model has the outer weights on every rank. If all deltas of a meeting are of
        closing workers, the outer weights move by their mean, without outer_lr and momentum.
        Rounding errors of a narrow `dtype` that remain are lost.

        Over boxes, send the last changes and all rounding errors, with outer_lr but without
        momentum, and take the outer weights into the model. After an error in a meeting, send
        nothing.

        Args:
            wait: True: over boxes, first wait until every other worker has closed or has died, so
                that the model has the changes of all workers. A worker that dies is waited for
                until its lease ends. Raises TimeoutError after the constructor's `timeout`; the
                worker has left then, too.
        """
        if self._closed:
            return
        self._check_works("close()")
        self._closed = True
        self._meetings.close(wait)

    def stats(self) -> dict[str, int]:
        """Return counters: steps, meetings (of one fragment each), refused (deltas of all ranks;
        over boxes, of this worker), and sent_bytes, which this rank has given to all_reduce or to
        the boxes.

        Over boxes also return received_bytes, and workers: the number of workers that were believed
        alive at the last meeting.
        """
        return self._meetings.stats()

    # -- the outer weights -----------------------------------------------------------------------

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Put the outer weights and the buffers of the last meeting into the model, to evaluate or
        save it. At the end of the block, restore the inner weights. Not a collective.

        The outer weights lack a fragment that is being sent. Over boxes the block has the outer
        weights as they are in the boxes now, with this worker's running exchange.
        """
        self._check_works("weights()", closed_too=False)
        with self._meetings.lend():
            self._lent = True
            try:
                yield
            finally:
                self._lent = False

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, with the inner weights, for load_state_dict(). Every worker
        saves its own, and the state of its inner optimizer. Tensors are copies.

        Ranks of a group save between the same two meetings. Workers over boxes save while none of
        them meets: otherwise the outer weights of the state that is loaded first may lack the
        deltas of other workers, or have them although their states have them too.

        Waits for the fragment that is being sent: over a group without applying it, over boxes by
        applying it. If this raises an error of the group, the transfer is given up, and the next
        call succeeds.
        """
        self._check_works("state_dict()", closed_too=False)
        return self._meetings.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a checkpoint. Collective over a process group; over boxes before the first step.

        If each rank gives the state that it saved in a group of the same size, the training
        continues as if it had not been interrupted. All arguments may be new, except `fragments`.

        Otherwise the ranks have changed, for example because one has died. All take the outer
        weights of a rank that has applied most meetings. A rank whose state has as many meetings
        keeps its inner weights, so its steps since then count at the next meeting. Every other rank
        takes the outer weights. A transfer is given up, and its deltas wait for the next meeting.
        The steps since the last meeting and the rounding errors of a rank that is gone are lost.

        Over boxes it returns when as many workers have called it as the constructor waited for
        (`workers`). The first of them writes the outer weights of its state to the boxes, and each
        continues from its own state. If training has begun in the boxes, a worker takes their
        weights instead, and of its state only the momentum and the counters.

        state: the result of state_dict(), or None on a worker that has none

        Raises:
            ValueError: the state is of another model or of other fragments, or no worker has a
                state; over boxes also, if outer weights of the state are not finite
            TypeError: the state is no mapping
            RuntimeError: another rank cannot load its state; no rank has loaded anything. Over
                boxes: after the first step, or the second call
            TimeoutError: over boxes, other workers did not call it within `timeout`.
        """
        self._check_works("load_state_dict()")
        self._meetings.load_state_dict(state)

    # -- inside ----------------------------------------------------------------------------------

    def _check_works(self, method: str, closed_too: bool = True) -> None:
        if self._closed and closed_too:
            raise RuntimeError(f"{method} after close()")
        if self._lent:
            raise RuntimeError(
                f"{method} within weights(): the model has the outer weights; leave the block first"
            )
