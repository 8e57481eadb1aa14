"""layer_drop_hook: layer-wise dropping as a communication hook of DistributedDataParallel.

DDP compares the hook's annotations with classes, so they must not be strings: this module does
without `from __future__ import annotations`.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import native
from torch_hbmcomm.groups import check_no_hook, chosen_group, group_of_model
from torch_hbmcomm.layer_drop.averaging import Averager
from torch_hbmcomm.layer_drop.buckets import BucketLayers, Buckets
from torch_hbmcomm.layer_drop.cache import Cache, own_share
from torch_hbmcomm.layer_drop.config import Granularity, LayerDrop, Representative, Target
from torch_hbmcomm.layer_drop.decision import DropRule
from torch_hbmcomm.layer_drop.optimizer import UpdateSkipper, move_to_gradients, optimizers_of
from torch_hbmcomm.layer_drop.statistics import (
    Statistics,
    warn_if_little_can_be_dropped,
    warn_not_finite,
)

_log = logging.getLogger("torch_hbmcomm.layer_drop")


def layer_drop_hook(
    state: "LayerDropState", bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket but for the layers that are dropped, as LayerDropState says.

    Register it with ``ddp.register_comm_hook(state, layer_drop_hook)``.
    """
    if not isinstance(state, LayerDropState):
        raise TypeError(
            "layer_drop_hook is registered with a LayerDropState, not with "
            f"{type(state).__name__}: ddp.register_comm_hook(LayerDropState(...), layer_drop_hook)"
        )
    return state.exchange(bucket)


class LayerDropState:
    """Layer-wise dropping with error feedback (Lee et al. 2020, sections 4 and 5) under DDP.

        ddp = DistributedDataParallel(model)
        state = hbmcomm.LayerDropState(None, ratio=0.9, model=ddp)  # on every rank of the group
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
        ...  # the training loop as it was

    Each rank adds its gradients to a cache. Layers whose accumulated gradient reaches the threshold
    are averaged over the ranks, and leave the cache; the others are zero in .grad, and wait.
    Nothing is lost: what was sent and what is cached add up to all gradients. DropRule in
    layer_drop/decision.py decides.

    All ranks decide alike: the layers' moments are averaged in a small synchronous allreduce for
    each bucket, on a communicator of this state's own; then the survivors of the bucket are packed
    at its beginning, and averaged in one asynchronous allreduce over the group.

    **The threshold** concerns the whole model, while a bucket is decided before later ones exist:
    it is searched for with the values of one step, every `every` steps, and used from the next one
    on. Until the first is found, everything is sent.

    Args:
        group: the model's, on any CPU backend; None is the default one
        ratio: see LayerDrop, as for every, warmup, representative, granularity, min_numel, max_age,
            cache_dtype, fixed_threshold and target; all of them the same on every rank
        model: needed for checkpoints and for layers that are modules, and checked to have this
            group
        wire_dtype: torch.bfloat16: survivors of float32 travel as that, and what rounding takes
            away stays in the cache
        skip_update: a layer that is dropped keeps its parameters and its optimizer's state in that
            step; a zero gradient would still let weight decay and momentum change them
        optimizer: needed for skip_update: the one that has the model's parameters, or several that
            have them between them
        scaler: the GradScaler whose scaled losses are differentiated, with one optimizer for the
            whole model. Gradients are cached unscaled; a step that it skips is undone here.
            Takes a second cache.
        log_every: steps between two lines of the logger torch_hbmcomm.layer_drop on rank 0; None:
            no lines

    Memory: a copy of the gradients, in cache_dtype.

    A parameter whose gradient is zero on all ranks is not sent in that step, whatever is cached:
    with find_unused_parameters, DDP would discard what comes back for one that no rank used.
    Clipping after backward() clips sums of gradients: a layer that waited is as large as those of
    several steps together.

    A gradient that is not finite is sent at once, so that it shows up in .grad on all ranks as it
    does without the hook; a RuntimeWarning names it, unless there is a scaler.

    Raises:
        ValueError, TypeError: a bad argument, or a model or bucket whose gradients cannot be sent
        RuntimeError: a backward() after one that did not end

    Threads: the hook in DDP's thread; the other methods between iterations.
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
        self._config = LayerDrop(
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
        self._group = chosen_group(group)
        if model is not None:
            group_of_model(model, self._group, "LayerDropState")
            check_no_hook(model)
        self._buckets = Buckets(model, self._config, wire_dtype)
        self._wire_dtype = wire_dtype
        self._scaler = _enabled(scaler)
        optimizers = optimizers_of(optimizer, skip_update, self._buckets.parameters)
        self._skipper = UpdateSkipper(optimizers) if skip_update else None
        self._log_every = log_every
        self._rule = DropRule(self._config)
        self._cache = Cache(cache_dtype, recoverable=self._scaler is not None)
        self._statistics = Statistics()
        self._averager = Averager(self._group)
        self._averager.check_equal(
            vars(self._config) | {"wire_dtype": wire_dtype, "scaler": self._scaler is not None}
        )
        self._unpack = native.load().layerdrop_unpack
        self._undecided = False  # a step has run, and does not count yet
        self._finite = self._direct = True
        self._dropped: list[str] = []

    # -- a step, from the hook downwards ---------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Do what layer_drop_hook does."""
        layers = self._buckets.open(bucket)
        if bucket.index() == 0:
            self._begin_step()
        if self._direct:
            future = self._average_all(layers, bucket.buffer())
        else:
            future = self._average_some(layers, bucket.buffer())
        if self._buckets.close(bucket):
            warn_if_little_can_be_dropped(self._config, self._buckets.layers)
        if bucket.is_last() and self._skipper is not None:
            parameters = self._buckets.parameters
            self._skipper.dropped = [parameters[name] for name in self._dropped]
        return future

    def _begin_step(self) -> None:
        self._settle()
        self._undecided = True
        self._finite = True
        self._dropped = []
        self._statistics.begin_step()
        self._direct = self._rule.sends_all and self._cache.empty and self._wire_dtype is None

    def _average_all(
        self, layers: BucketLayers, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the whole bucket: nothing is decided or cached."""
        self._statistics.count_all(layers, buffer)
        work = self._averager.start(self._averager.scaled(buffer))
        return work.then(lambda future: _value(future, buffer))

    def _average_some(
        self, layers: BucketLayers, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Cache the bucket, pack the parameters that are sent at its beginning, and average them;
        then spread them over the bucket again, which is zero elsewhere."""
        sent = self._decide(layers, buffer)
        counts = [layers.counts[index] for index in sent]
        wire = buffer.view(layers.wire)[: sum(counts)]
        if not counts:
            buffer.zero_()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        factor = self._scale() * self._averager.factor(layers.wire)
        self._cache.pack([layers.names[index] for index in sent], wire, factor)
        begins = [layers.begins[index] for index in sent]

        def unpack(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what the allreduce did
            if not self._unpack(wire, buffer, begins, counts):
                self._finite = False
            return buffer

        return self._averager.start(wire).then(unpack)

    def _decide(self, layers: BucketLayers, buffer: torch.Tensor) -> list[int]:
        """Cache the bucket. Returns the indices of the parameters that are sent: those of the
        layers that the rule sends, unless a gradient is zero on all ranks."""
        moments, zeros = self._cache.accumulate(
            layers.names, buffer.split(layers.counts), 1 / self._scale(), self._config.squares
        )
        told = torch.tensor([moments, zeros], dtype=torch.float64)
        moments, zeros = self._averager.agree(told).tolist()
        idle = {name for name, zero in zip(layers.names, zeros, strict=True) if zero == 1}
        of_layers = layers.sums(moments)
        decisions = self._rule.decide(layers.layers, of_layers, idle)
        if self._scaler is None:
            warn_not_finite(layers.layers, of_layers)
        self._statistics.count(layers, decisions, buffer, told)
        sent = sorted(
            member
            for layer, goes in zip(layers.layers, decisions, strict=True)
            for member in layer.members
            if goes and layers.names[member] not in idle
        )
        self._dropped += [layers.names[i] for i in set(range(len(layers.names))).difference(sent)]
        return sent

    def _scale(self) -> float:
        """Return the factor that the scaler has put on gradients."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _settle(self) -> None:
        """Count the last step, or, when the scaler skipped it, undo it. Raises RuntimeError in the
        middle of one."""
        self._buckets.check_ended()
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

    # -- between steps ---------------------------------------------------------------------------

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        """Average what is cached over the ranks and apply it by one more step of the optimizer.

        All ranks call it after the last step. Then nothing is cached, and gradients are cleared.
        """
        self._settle()
        move_to_gradients(self._cache, self._buckets.parameters, self._averager)
        self._rule.forget_waiting()
        if self._skipper is not None:
            self._skipper.dropped = ()
        optimizer.step()
        optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has to save, between two iterations: each rank saves its own.

        Caches are by the parameters' names and in their shapes. Raises RuntimeError without
        `model`.
        """
        self._check_named("state_dict()")
        self._settle()
        return {
            "rank": self._group.rank(),
            "ranks": self._group.size(),
            "names": list(self._buckets.parameters),
            "rule": self._rule.state_dict(),
            "caches": self._cache.state_dict(self._buckets.parameters),
            "statistics": self._statistics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint, between two iterations; all ranks call it.

        Args:
            state: what this rank saved; or what all ranks saved, in a sequence: so many as there
                were then, which may be another number than now. Their caches are handed out and
                added up, so that the sum over the ranks stays.

        Raises ValueError for those of another model, rank or number of ranks; then nothing has
        changed.
        """
        self._check_named("load_state_dict()")
        self._settle()
        parameters = self._buckets.parameters
        own = own_share(state, self._group.rank(), self._group.size(), list(parameters))
        rule = DropRule(self._config)
        rule.load_state_dict(own.common["rule"])
        self._cache.load_state_dict([one["caches"] for one in own.states], parameters)
        self._rule = rule
        self._statistics.load_state_dict(own.common["statistics"])

    def summary(self) -> dict[str, float]:
        """Return what this rank has counted.

        Since the start: `steps`; `gradient_bytes`, which DDP alone would have sent; `sent_bytes`,
        with what decisions took; `sent_share` of the gradients' elements; `refused_steps`, which
        the scaler skipped after a decision. Of the last step: `layers`, `sent_layers`. Now:
        `threshold` (-1: none), `waiting` parameters, `mean_age` and `oldest_age` of these in steps,
        `cache_norm` (L2).
        """
        self._settle()
        ages = self._rule.waited.values()
        return self._statistics.summary() | {
            "threshold": self._rule.threshold,
            "waiting": len(ages),
            "mean_age": sum(ages) / max(len(ages), 1),
            "oldest_age": max(ages, default=0),
            "cache_norm": self._cache.norm(),
        }

    def _check_named(self, method: str) -> None:
        if not self._buckets.named:
            raise RuntimeError(
                f"{method} needs the parameters' names: make LayerDropState(model=...)"
            )


def _enabled(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """Return the scaler; None for one that does nothing. Raises TypeError."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}")
    return scaler if scaler is not None and scaler.is_enabled() else None


def _value(future: torch.futures.Future[Any], buffer: torch.Tensor) -> torch.Tensor:
    future.value()  # raises what the allreduce did
    return buffer
