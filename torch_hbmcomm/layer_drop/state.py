"""The state of layer_drop_hook, as a training script sees it."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.agreement import together
from torch_hbmcomm.groups import HookState, check_no_hook, group_of_model, group_to_report_in
from torch_hbmcomm.layer_drop.averaging import Averager, check_equal
from torch_hbmcomm.layer_drop.bucket_factors import BucketFactors
from torch_hbmcomm.layer_drop.buckets import BucketLayers, Buckets
from torch_hbmcomm.layer_drop.cache import Cache, own_share
from torch_hbmcomm.layer_drop.config import Granularity, LayerDrop, Representative, Target
from torch_hbmcomm.layer_drop.decision import DropRule
from torch_hbmcomm.layer_drop.low_rank import LowRankRule
from torch_hbmcomm.layer_drop.optimizer import (
    MomentumDamper,
    SecondMomentMender,
    UpdateSkipper,
    move_to_gradients,
    optimizers_of,
)
from torch_hbmcomm.layer_drop.passes import unpack, unpack_around
from torch_hbmcomm.layer_drop.statistics import (
    Statistics,
    warn_if_little_can_be_dropped,
    warn_late,
    warn_not_finite,
)
from torch_hbmcomm.optimizers import optimizers_to_drain, step_and_clear

_log = logging.getLogger("torch_hbmcomm.layer_drop")


class LayerDropState(HookState):
    """A part of the gradients in each step, the rest later, under DDP.

        ddp = DistributedDataParallel(model)
        state = hbmcomm.LayerDropState(None, ratio=0.9, model=ddp)  # on every rank of the group
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
        ...  # the training loop as it was

    Each rank adds its gradients to a cache. What is averaged over the ranks leaves it, and the rest
    waits. Nothing is lost: what was sent and what is cached add up to all gradients.

    **target="low_rank"** (default): of each matrix of gradients an approximation is averaged, whose
    rank follows from the budget of bytes and from where they take most out of the caches (Vogels et
    al. 2019; low_rank.py). A bucket takes two allreduces on a communicator of this state's own, of
    the left factors and of what decides, which are waited for; and one over the group, of the right
    factors and of what is sent whole, packed at the bucket's beginning. Above
    R = 0.5 SGD's momentum is damped along what was sent, and Adam's second moment is kept near
    that of the gradients. A matrix of which too much waits goes whole.

    **target="bytes", "paper"**: layers are sent whole or not at all (Lee et al. 2020, sections 4
    and 5; decision.py). Those whose accumulated gradient reaches a threshold are averaged; the
    others are zero in .grad. The layers' moments are averaged in a small synchronous allreduce for
    each bucket, the survivors in one asynchronous one.

    **The threshold** concerns the whole model, while a bucket is decided before later ones exist:
    it is searched for with the values of one step, every `every` steps, and used from the next one
    on. Until the first is found, everything is sent.

    Args:
        group: the model's, on any CPU backend; None is the default one. Parameters on an
            accelerator need one that serves both devices, as "hbm" does
        ratio: see LayerDrop, as for every, warmup, representative, granularity, min_numel,
            always_send, max_age, cache_dtype, fixed_threshold, target, relaxation and damping; all
            of them the same on every rank
        model: needed for checkpoints and for layers that are modules, and checked to have this
            group
        wire_dtype: torch.bfloat16: gradients of float32 travel as that, and what rounding takes
            away stays in the cache
        skip_update: a layer that is dropped keeps its parameters and its optimizer's state in that
            step; a zero gradient would still let weight decay and momentum change them. None: with
            target="bytes" alone, whatever optimizer steps, unless it is given a closure
        optimizer: needed for skip_update=True: the one that has the model's parameters, or several
            that have them between them
        scaler: the GradScaler whose scaled losses are differentiated, with one optimizer for the
            whole model. Gradients are cached unscaled; a step that it skips is undone here.
            Takes a second cache.
        log_every: steps between two lines of the logger torch_hbmcomm.layer_drop on rank 0; None:
            no lines

    Memory: a copy of the gradients, in cache_dtype, where they lie.

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
        min_numel: int | None = None,
        always_send: bool = True,
        max_age: float | None = None,
        cache_dtype: torch.dtype | None = None,
        fixed_threshold: float | None = None,
        target: Target = "low_rank",
        relaxation: float | None = None,
        damping: float | None = None,
        model: DistributedDataParallel | None = None,
        wire_dtype: torch.dtype | None = None,
        skip_update: bool | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        log_every: int | None = 100,
    ) -> None:
        given = dict(locals())
        terms = {term.name: given[term.name] for term in fields(LayerDrop)}
        self._wire_dtype = wire_dtype
        self._log_every = log_every
        self._group = group_to_report_in(group, model)
        told = together(
            self._group,
            lambda: self._prepare(group, terms, model, skip_update, optimizer, scaler),
        )
        check_equal([settings for settings, _ in told])
        self._averager = Averager(self._group, told[0][1])
        self._rule = self._new_rule()
        self._statistics = Statistics()
        self._undecided = False  # a step has run, and does not count yet
        self._finite = self._direct = True
        self._warned: set[str] = set()  # of these layers, that they are late

    def _prepare(
        self,
        group: dist.ProcessGroup | None,
        terms: Mapping[str, Any],
        model: DistributedDataParallel | None,
        skip_update: bool | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        scaler: torch.amp.GradScaler | None,
    ) -> tuple[dict[str, Any], str]:
        """Check the arguments. Returns the settings that all ranks must have alike, and a unique
        name for a group."""
        self._config = config = LayerDrop(**terms)
        if self._wire_dtype not in (None, torch.bfloat16):
            raise ValueError(f"wire_dtype is None or torch.bfloat16, not {self._wire_dtype}")
        if self._log_every is not None and self._log_every < 1:
            raise ValueError(f"log_every is at least 1, not {self._log_every}; None is never")
        if config.granularity == "module" and model is None:
            raise ValueError('granularity="module" needs the modules\' names: give model=...')
        if model is not None:
            group_of_model(model, group, "LayerDropState")
            check_no_hook(model)
        self._buckets = Buckets(model, config, self._wire_dtype)
        self._scaler = _enabled(scaler)
        optimizers = optimizers_of(optimizer, skip_update, self._buckets.parameters)
        skips = config.target == "bytes" if skip_update is None else skip_update
        self._skipper = UpdateSkipper(optimizers) if skips else None
        approximates = config.target == "low_rank"
        damps = approximates and config.damped > 0
        self._damper = MomentumDamper(config.damped) if damps else None
        self._mender = SecondMomentMender() if approximates else None
        self._cache = Cache(config.cache_dtype, recoverable=self._scaler is not None)
        settings = {"wire_dtype": self._wire_dtype, "scaler": self._scaler is not None}
        return vars(config) | settings, f"layer-drop/{secrets.token_hex(8)}"

    def _new_rule(self) -> LowRankRule | DropRule:
        low_rank = self._config.target == "low_rank"
        return LowRankRule(self._config) if low_rank else DropRule(self._config)

    # -- a step, from the hook downwards ---------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Do what layer_drop_hook does."""
        layers = self._buckets.open(bucket)
        if self._buckets.begins:
            self._begin_step()
        if self._direct:
            future = self._average_all(layers, bucket.buffer())
        elif isinstance(self._rule, LowRankRule):
            future = self._approximate(self._rule, layers, bucket.buffer())
        else:
            future = self._average_some(self._rule, layers, bucket.buffer())
        self._buckets.close(bucket)
        if self._buckets.first_ended():
            warn_if_little_can_be_dropped(self._config, self._buckets.layers)
        return future

    def _clear_step_hooks(self) -> None:
        """Forget what the last backward() left for the next step of the optimizers."""
        if self._skipper is not None:
            self._skipper.dropped.clear()
        if self._mender is not None:
            self._mender.clear()
        if self._damper is not None:
            self._damper.clear()

    def _begin_step(self) -> None:
        self._settle()
        self._undecided = True
        self._finite = True
        self._clear_step_hooks()
        self._statistics.begin_step()
        self._direct = self._rule.sends_all and self._cache.empty and self._wire_dtype is None

    def _average_all(
        self, layers: BucketLayers, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the whole bucket: nothing is decided or cached."""
        self._statistics.count_all(layers, buffer)
        if isinstance(self._rule, LowRankRule):
            self._rule.end_bucket(layers, told=0, sent=layers.nbytes)
        work = self._averager.start(self._averager.scaled(buffer))
        return work.then(lambda future: _value(future, buffer))

    def _average_some(
        self, rule: DropRule, layers: BucketLayers, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Cache the bucket, and average the parameters of the layers that the rule sends, unless a
        gradient is zero on all ranks."""
        moments, sizes = self._accumulate(layers, buffer, self._config.squares)
        told = torch.tensor([moments, [size == 0 for size in sizes]], dtype=torch.float64)
        moments, zeros = self._averager.agree(told).tolist()
        idle = {name for name, zero in zip(layers.names, zeros, strict=True) if zero == 1}
        of_layers = layers.sums(moments)
        decisions = rule.decide(layers.layers, of_layers, idle)
        self._warn(layers, of_layers)
        gone = [layer for layer, goes in zip(layers.layers, decisions, strict=True) if goes]
        elements = sum(layer.numel for layer in gone)
        self._statistics.count(layers, len(gone), elements, buffer, told.nbytes)
        sent = [i for layer in gone for i in layer.members if layers.names[i] not in idle]
        return self._send(layers, buffer, sorted(sent))

    def _approximate(
        self, rule: LowRankRule, layers: BucketLayers, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Cache the bucket, and average an approximation of each matrix that has a rank, and the
        whole of what is no matrix, unless a gradient is zero on all ranks.

        A matrix goes whole, too, whose cache or left factor is not finite.
        """
        cached, sizes = self._accumulate(layers, buffer)
        rule.open_bucket(layers)
        factors = BucketFactors(rule, layers, self._cache, self._wire_factor(layers))
        lefts = self._averager.start(factors.lefts, beside=True)
        own = rule.measure(layers, cached, buffer.split(layers.counts), sizes, 1 / self._scale())
        told = own.pack()
        found = own.unpack(self._averager.agree(told))
        moments, news = found.moments, found.gradients
        lefts.wait()
        awake = {i for i, new in enumerate(news) if new != 0 and moments[i] != 0}
        factors.choose({i for i in awake if math.isfinite(moments[i])})
        for matrix, basis in factors.bases:
            parameter = self._buckets.parameters[matrix.name]
            if self._mender is not None:
                self._mender.add(parameter, rule.size_part(matrix))
            if self._damper is not None:
                self._damper.add(parameter, matrix, basis)
        waits = {
            i
            for i, matrix in enumerate(layers.matrices)
            if matrix is not None and rule.waits(matrix) and math.isfinite(moments[i])
        }
        whole = sorted(awake.difference(factors.chosen, waits))
        self._warn(layers, layers.sums(moments))
        elements = sum(layers.counts[index] for index in whole) + factors.numel
        sent = (elements + factors.lefts.numel()) * layers.wire.itemsize
        told_bytes = told.nbytes + factors.lefts.nbytes
        self._statistics.count(layers, len(whole), elements, buffer, told_bytes)
        rule.end_bucket(layers, found, told=told.nbytes, sent=sent)
        return self._send(layers, buffer, whole, factors)

    def _accumulate(
        self, layers: BucketLayers, buffer: torch.Tensor, squares: bool = False
    ) -> tuple[list[float], list[float]]:
        """Add the bucket, unscaled, to the cache."""
        gradients = buffer.split(layers.counts)
        return self._cache.accumulate(layers.names, gradients, 1 / self._scale(), squares)

    def _send(
        self,
        layers: BucketLayers,
        buffer: torch.Tensor,
        whole: Sequence[int],
        factors: BucketFactors | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Pack parameters, by index, and right factors at the bucket's beginning, and average them;
        then spread them over the bucket, which is zero elsewhere."""
        if self._skipper is not None:
            approximated = () if factors is None else factors.chosen
            self._skipper.dropped += [
                self._buckets.parameters[name]
                for index, name in enumerate(layers.names)
                if index not in whole and index not in approximated
            ]
        counts = [layers.counts[index] for index in whole]
        end = sum(counts)
        wire = buffer.view(layers.wire)[: end + (0 if factors is None else factors.numel)]
        if not wire.numel():
            buffer.zero_()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=None if buffer.is_cpu else [buffer.device]
            )
            done.set_result(buffer)
            return done
        self._cache.pack(
            [layers.names[index] for index in whole], wire[:end], self._wire_factor(layers)
        )
        if factors is not None:
            factors.take_out(wire[end:])
        begins = [layers.begins[index] for index in whole]
        scale = self._scale()

        def spread(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what the allreduce did
            if factors is None:
                finite = unpack(wire, buffer, begins, counts)
            else:
                apart = wire.clone()  # what is spread is written over it
                finite = unpack_around(apart[:end], buffer, begins, counts, factors.places)
                finite &= factors.restore(apart[end:], buffer, scale)
            if not finite:
                self._finite = False
            return buffer

        return self._averager.start(wire).then(spread)

    def _warn(self, layers: BucketLayers, moments: Sequence[float]) -> None:
        if self._scaler is None:
            warn_not_finite(layers.layers, moments)

    def _warn_late(self, late: Mapping[str, float]) -> None:
        """Warn of each layer once."""
        new = {name: count for name, count in late.items() if name not in self._warned}
        self._warned.update(new)
        warn_late(new, self._config.ratio)

    def _wire_factor(self, layers: BucketLayers) -> float:
        """Return what unscaled values are multiplied by on the wire."""
        return self._scale() * self._averager.factor(layers.wire)

    def _scale(self) -> float:
        """Return the factor that the scaler has put on gradients."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _settle(self) -> None:
        """Count the last step, or, when the scaler skipped it, undo it. Raises RuntimeError in the
        middle of one."""
        self._buckets.check_ended()
        self._buckets.check_orders()
        if not self._undecided:
            return
        self._undecided = False
        if self._scaler is not None and not self._finite:
            self._cache.roll_back()
            self._rule.cancel_step()
            self._statistics.refuse_step()
            return
        self._cache.commit()
        if isinstance(self._rule, LowRankRule):
            self._rule.end_step()
            self._warn_late(self._rule.late)
        else:
            self._rule.end_step(self._statistics.overhead)
        self._statistics.end_step()
        steps = self._statistics.steps
        if self._log_every and steps % self._log_every == 0 and self._group.rank() == 0:
            _log.info("%s", self._statistics.line(self._rule.threshold))

    # -- between steps ---------------------------------------------------------------------------

    def drain(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """Average what is cached over the ranks and apply it by one more step of the optimizer, or
        of each of several, which have all parameters of the model between them.

        All ranks call it after the last step. Then nothing is cached, and gradients are cleared.

        Raises ValueError or TypeError on all ranks for optimizers that lack a parameter or whose
        step() needs a closure; then nothing has changed. If a step() raises, the averages are in
        .grad, and no longer cached.
        """
        self._settle()
        optimizers: list[torch.optim.Optimizer] = []
        together(
            self._group,
            lambda: optimizers.extend(optimizers_to_drain(optimizer, self._buckets.parameters)),
        )
        move_to_gradients(self._cache, self._buckets.parameters, self._averager)
        self._rule.forget_waiting()
        self._clear_step_hooks()
        step_and_clear(optimizers)

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
            "target": self._config.target,
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

        Raises ValueError for those of another model, rank or number of ranks, and for those of
        target="low_rank" with another one, and the other way round; then nothing has changed.
        """
        self._check_named("load_state_dict()")
        self._settle()
        parameters = self._buckets.parameters
        own = own_share(
            state, self._group.rank(), self._group.size(), list(parameters), {"statistics"}
        )
        saved = own.common.get("target", "bytes")
        if (saved == "low_rank") != (self._config.target == "low_rank"):
            raise ValueError(
                f'the checkpoint is of target="{saved}", and this state is of '
                f'target="{self._config.target}": use the same one'
            )
        rule, statistics = self._new_rule(), Statistics()
        try:
            rule.load_state_dict(own.common["rule"])
            statistics.load_state_dict(own.common["statistics"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the state is damaged ({type(error).__name__}: {error}): load what state_dict() "
                "returned"
            ) from error
        self._cache.load_state_dict([one["caches"] for one in own.states], parameters)
        self._rule, self._statistics = rule, statistics

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
