"""The state of layer_drop_hook as a training script sees it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import native
from torch_hbmcomm.layer_drop.agreement import Agreement
from torch_hbmcomm.layer_drop.bucket import Plan, plan_of
from torch_hbmcomm.layer_drop.cache import Cache
from torch_hbmcomm.layer_drop.checkpoint import own_share
from torch_hbmcomm.layer_drop.checks import (
    enabled,
    group_of,
    optimizers_of,
    warn_if_little_can_be_dropped,
    warn_not_finite,
)
from torch_hbmcomm.layer_drop.drain import move_to_gradients
from torch_hbmcomm.layer_drop.mean import Mean
from torch_hbmcomm.layer_drop.names import Names
from torch_hbmcomm.layer_drop.rule import Rule
from torch_hbmcomm.layer_drop.skipping import Skipping
from torch_hbmcomm.layer_drop.statistics import Statistics
from torch_hbmcomm.layer_drop.terms import Granularity, LayerDrop, Representative, Target

_log = logging.getLogger("torch_hbmcomm.layer_drop")


class LayerDropState:
    """For layer-wise dropping with error feedback (Lee et al. 2020, sections 4 and 5) under DDP.

        ddp = DistributedDataParallel(model)
        state = hbmcomm.LayerDropState(None, ratio=0.9, model=ddp)  # on every rank of the group
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
        ...  # the training loop as it was

    Each rank adds its gradients to a cache. Layers whose accumulated gradient reaches the threshold
    are averaged over the ranks, and leave the cache; the others are zero in .grad, and wait.
    Nothing is lost: what was sent and what is cached add up to all gradients.

    All ranks decide alike: the layers' moments are averaged in a small synchronous allreduce for
    each bucket, on a communicator of this state's own; then the survivors of the bucket are packed
    at its beginning, and averaged in one asynchronous allreduce over the group.

    **The threshold** concerns the whole model, while a bucket is decided before later ones exist:
    it is searched for with the values of one step, every `every` steps, and used from the next one
    on. Until the first is found, everything is sent.

    Args:
        group: the model's; None is the default one. Any CPU backend.
        ratio, every, warmup, representative, granularity, min_numel, max_age, cache_dtype,
            fixed_threshold, target: see LayerDrop; the same on every rank
        model: needed for checkpoints and for layers that are modules; without it, nothing checks
            that it has this group
        wire_dtype: torch.bfloat16: survivors of float32 travel as that, and what rounding takes
            away stays in the cache
        skip_update: a layer that is dropped keeps its parameters and its optimizer's state in that
            step, which a zero gradient does not see to
        optimizer: needed for skip_update: those that have the model's parameters, one or several
        scaler: the GradScaler whose scaled losses are differentiated, with one optimizer for the
            whole model. Gradients are cached unscaled; a step that it skips leaves no trace here.
            Takes a second cache.
        log_every: steps between two lines of the logger torch_hbmcomm.layer_drop on rank 0; None:
            no lines

    Memory: a copy of the gradients, in cache_dtype.

    A parameter whose gradient is zero on all ranks is not sent in that step, whatever is cached:
    with find_unused_parameters, DDP would discard what comes back for one that nobody used.
    Clipping after backward() clips sums of gradients: a layer that waited is as large as those of
    several steps together.

    A gradient that is not finite is sent at once, so that it shows up in .grad on all ranks as it
    does without the hook; a RuntimeWarning names it, unless there is a scaler.

    Raises:
        ValueError, TypeError: arguments, or a model or bucket that cannot be carried
        RuntimeError: a backward() that does not fit the one before

    Threads: DDP's alone; the other methods between iterations.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ratio: float = 0.9,
        every: int = 100,
        *,
        warmup: int = 0,
        representative: Representative = "mean",
        granularity: Granularity = "parameter",
        min_numel: int = 4096,
        max_age: int | None = None,
        cache_dtype: torch.dtype | None = None,
        fixed_threshold: float | None = None,
        target: Target = "bytes",
        model: DistributedDataParallel | None = None,
        wire_dtype: torch.dtype | None = None,
        skip_update: bool = False,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        log_every: int | None = 100,
    ) -> None:
        self._terms = LayerDrop(
            ratio=ratio,
            every=every,
            warmup=warmup,
            representative=representative,
            granularity=granularity,
            min_numel=min_numel,
            max_age=max_age,
            cache_dtype=cache_dtype,
            fixed_threshold=fixed_threshold,
            target=target,
        )
        if wire_dtype not in (None, torch.bfloat16):
            raise ValueError(f"wire_dtype is None or torch.bfloat16, not {wire_dtype}")
        if log_every is not None and log_every < 1:
            raise ValueError(f"log_every is at least 1, not {log_every}; None is never")
        if granularity == "module" and model is None:
            raise ValueError('granularity="module" needs the modules\' names: give model=...')
        self._model = model
        self._group = group_of(model, group)
        self._names = Names(None if model is None else model.module)
        self._wire_dtype = wire_dtype
        self._scaler = enabled(scaler)
        optimizers = optimizers_of(optimizer, skip_update, self._names.parameters)
        self._skipping = Skipping(optimizers) if skip_update else None
        self._log_every = log_every
        self._rule = Rule(self._terms)
        self._cache = Cache(cache_dtype, recoverable=self._scaler is not None)
        self._statistics = Statistics()
        self._mean = Mean(self._group)
        self._agreement = Agreement(self._group)
        self._agreement.check_equal(
            vars(self._terms) | {"wire_dtype": wire_dtype, "scaler": self._scaler is not None}
        )
        self._unpack = native.load().layerdrop_unpack
        self._plans: dict[int, tuple[list[int], Plan]] = {}
        self._next_bucket = 0
        self._undecided = False  # a step has run, and does not count yet
        self._finite = self._direct = True
        self._dropped: list[str] = []

    # -- in training -----------------------------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What layer_drop_hook does."""
        self._check_order(bucket)
        plan = self._plan(bucket)
        if bucket.index() == 0:
            self._begin_step()
        future = (
            self._average_all(bucket, plan) if self._direct else self._average_some(bucket, plan)
        )
        self._next_bucket += 1
        if bucket.is_last():
            self._next_bucket = 0
            if self._names.close():
                warn_if_little_can_be_dropped(
                    self._terms, [plan for _, plan in self._plans.values()]
                )
            if self._skipping is not None:
                parameters = self._names.parameters
                self._skipping.dropped = [parameters[name] for name in self._dropped]
        return future

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        """After the last step, on every rank: what is cached is averaged over the ranks and applied
        by one more step of the optimizer. Gradients are cleared, and nothing is cached then."""
        self._settle()
        move_to_gradients(self._cache, self._names.parameters, self._mean)
        self._rule.forget_waiting()
        if self._skipping is not None:
            self._skipping.dropped = ()
        optimizer.step()
        optimizer.zero_grad()

    # -- checkpoints and statistics --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank has to save, between two iterations: each rank saves its own. Caches are
        by the parameters' names and in their shapes. Raises RuntimeError without `model`."""
        self._check_named("state_dict()")
        self._settle()
        return {
            "rank": self._group.rank(),
            "ranks": self._group.size(),
            "names": list(self._names.parameters),
            "rule": self._rule.state_dict(),
            "caches": self._cache.state_dict(self._names.parameters),
            "statistics": self._statistics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Between two iterations, on every rank.

        Args:
            state: what this rank saved; or what all ranks saved, in a sequence: so many as there
                were then, which may be another number than now. Their caches are handed out and
                added up, so that the sum over the ranks stays.

        Raises ValueError for those of another model, rank or number of ranks; then nothing has
        changed.
        """
        self._check_named("load_state_dict()")
        self._settle()
        own = own_share(state, self._group.rank(), self._group.size(), list(self._names.parameters))
        rule = Rule(self._terms)
        rule.load_state_dict(own.common["rule"])
        self._cache.load_state_dict([one["caches"] for one in own.states], self._names.parameters)
        self._rule = rule
        self._statistics.load_state_dict(own.common["statistics"])

    def summary(self) -> dict[str, float]:
        """Counted since the start, on this rank: `steps`; `gradient_bytes`, which DDP alone would
        have sent; `sent_bytes`, with what decisions took; `sent_share` of the gradients' elements;
        `refused_steps`, which the scaler skipped after a decision. Of the last step: `layers`,
        `sent_layers`. Now: `threshold` (-1: none), `waiting` parameters, `mean_age` and
        `oldest_age` of these in steps, `cache_norm` (L2)."""
        self._settle()
        ages = self._rule.waited.values()
        return self._statistics.summary() | {
            "threshold": self._rule.threshold,
            "waiting": len(ages),
            "mean_age": sum(ages) / max(len(ages), 1),
            "oldest_age": max(ages, default=0),
            "cache_norm": self._cache.norm(),
        }

    # -- a step ----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._settle()
        self._undecided = True
        self._finite = True
        self._dropped = []
        self._statistics.begin_step()
        self._direct = self._rule.sends_all and self._cache.empty and self._wire_dtype is None

    def _settle(self) -> None:
        """The last step counts, or, when the scaler skipped it, does not. Raises RuntimeError in
        the middle of one."""
        if self._next_bucket != 0:
            raise RuntimeError(
                "the last backward() did not end, and part of its gradients has been sent: go on "
                "from a checkpoint, with a new model and a new LayerDropState"
            )
        if not self._undecided:
            return
        self._undecided = False
        if self._scaler is not None and not self._finite:
            self._cache.roll_back()
            self._rule.cancel_step()
            self._statistics.refuse_step()
            return
        self._cache.commit()
        self._rule.end_step(self._statistics.overhead)
        self._statistics.end_step()
        steps = self._statistics.steps
        if self._log_every and steps % self._log_every == 0 and self._group.rank() == 0:
            _log.info("%s", self._statistics.line(self._rule.threshold))

    def _average_all(self, bucket: GradBucket, plan: Plan) -> torch.futures.Future[torch.Tensor]:
        """Without decisions: nothing is cached, and nothing will be."""
        buffer = bucket.buffer()
        self._statistics.count_all(plan, buffer)
        work = self._mean.start(self._mean.scaled(buffer))
        return work.then(lambda future: _value(future, buffer))

    def _average_some(self, bucket: GradBucket, plan: Plan) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = self._decide(plan, buffer)
        counts = [plan.counts[index] for index in sent]
        wire = buffer.view(plan.wire)[: sum(counts)]
        if not counts:
            buffer.zero_()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        factor = self._scale() * self._mean.factor(plan.wire)
        self._cache.pack([plan.names[index] for index in sent], wire, factor)
        begins = [plan.begins[index] for index in sent]

        def land(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what the allreduce did
            if not self._unpack(wire, buffer, begins, counts):
                self._finite = False
            return buffer

        return self._mean.start(wire).then(land)

    def _decide(self, plan: Plan, buffer: torch.Tensor) -> list[int]:
        """The indices of the parameters that are sent. All gradients are in the cache then."""
        moments, zeros = self._cache.accumulate(
            plan.names, buffer.split(plan.counts), 1 / self._scale(), self._terms.squares
        )
        told = torch.tensor([moments, zeros], dtype=torch.float64)
        moments, zeros = self._agreement.mean(told).tolist()
        idle = [zero == 1 for zero in zeros]  # on all ranks
        asleep = {name for name, still in zip(plan.names, idle, strict=True) if still}
        of_layers = plan.sums(moments)
        decisions = self._rule.decide(plan.layers, of_layers, asleep)
        if self._scaler is None:
            warn_not_finite(plan, of_layers)
        self._statistics.count(plan, decisions, buffer, told)
        sent = sorted(
            member
            for layer, goes in zip(plan.layers, decisions, strict=True)
            for member in layer.members
            if goes and not idle[member]
        )
        self._dropped += [plan.names[i] for i in set(range(len(plan.names))).difference(sent)]
        return sent

    def _scale(self) -> float:
        """What gradients are multiples of."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    # -- checks ----------------------------------------------------------------------------------

    def _plan(self, bucket: GradBucket) -> Plan:
        """Made again when DDP has arranged its buckets anew."""
        ids = [id(parameter) for parameter in bucket.parameters()]
        known = self._plans.get(bucket.index())
        if known is None or known[0] != ids:
            known = ids, plan_of(bucket, self._names, self._terms, self._wire_dtype)
            self._plans[bucket.index()] = known
        return known[1]

    def _check_order(self, bucket: GradBucket) -> None:
        if bucket.index() != self._next_bucket:
            raise RuntimeError(
                f"bucket {bucket.index()} came where bucket {self._next_bucket} was to come: a "
                "backward() before did not end, or two DDP models share this LayerDropState; make "
                "a new one for each"
            )
        if self._model is not None and self._model._join_config.enable:
            raise ValueError(
                "ddp.join() stands in for ranks that are done with zeros for each bucket as a "
                "whole, and dropped layers are not sent: leave it out, and give all ranks the same "
                "number of iterations"
            )

    def _check_named(self, method: str) -> None:
        if not self._names.known:
            raise RuntimeError(
                f"{method} needs the parameters' names: make LayerDropState(model=...)"
            )


def _value(future: torch.futures.Future[Any], buffer: torch.Tensor) -> torch.Tensor:
    future.value()  # raises what the allreduce did
    return buffer
