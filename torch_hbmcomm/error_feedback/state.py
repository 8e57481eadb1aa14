"""The common part of LayerDropState and LowRankState: all except the encoder."""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.agreement import together
from torch_hbmcomm.error_feedback.automatic import Automatic, Way
from torch_hbmcomm.error_feedback.averaging import Averager, check_equal
from torch_hbmcomm.error_feedback.buckets import BucketLayers, Buckets, BucketSource
from torch_hbmcomm.error_feedback.config import AUTO, EncoderConfig
from torch_hbmcomm.error_feedback.encoder import Accumulated, Code, Encoded, Encoder
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.error_feedback.optimizer import UpdateSkipper, average_residuals, set_gradients
from torch_hbmcomm.error_feedback.passes import unpack, unpack_around
from torch_hbmcomm.error_feedback.residuals import Residuals, own_share
from torch_hbmcomm.error_feedback.statistics import (
    Statistics,
    warn_if_little_can_wait,
    warn_not_finite,
)
from torch_hbmcomm.error_feedback.whole import encode_whole
from torch_hbmcomm.groups import HookState, check_no_hook, check_wrapped, group_to_report_in
from torch_hbmcomm.optimizers import (
    Optimizer,
    optimizers_to_drain,
    optimizers_with,
    step_and_clear,
)
from torch_hbmcomm.tensors import is_finite

Config = TypeVar("Config", bound=EncoderConfig)


class StepHook(Protocol):
    """Adapts the optimizers' next step to the parameters that the last backward() sent."""

    def clear(self) -> None:
        """Forget the last backward()."""


class Bucket(Protocol):
    """Gradients of one dtype that are averaged together, such as a GradBucket of DDP."""

    def buffer(self) -> torch.Tensor:
        """Return the gradients, flat, which exchange() replaces by their averages."""


class ErrorFeedbackState(HookState, ABC, Generic[Config]):
    """Base of LayerDropState and LowRankState, which document it.

    hook_name: the name of the hook that takes the state, which checkpoints contain.
    """

    hook_name: ClassVar[str]
    config_class: ClassVar[type[EncoderConfig]]
    logger: ClassVar[logging.Logger]

    def __init__(
        self,
        ddp: nn.Module,
        config: Config,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        scaler: torch.amp.GradScaler | None,
        log_every: int | None,
    ) -> None:
        self._config = config
        self._log_every = log_every
        self._everyone = self._group_of_everyone(ddp)
        prepared = together(self._everyone, lambda: self._prepare(ddp, optimizer, scaler))
        self._check_alike([settings for settings, _ in prepared])
        first = dist.get_global_rank(self._group, 0)
        name = prepared[dist.get_group_rank(self._everyone, first)][1]
        self._averager = Averager(self._group, name, self.hook_name)
        self._warmup = config.warmup
        if config.ratio == AUTO:
            self._config = replace(config, warmup=0)  # Automatic warms up, not the encoder
        self._encoder = self._new_encoder()
        self._statistics = Statistics()
        self._automatic = self._new_automatic()
        self._undecided = False  # a step has run, and _settle() must count or undo it
        self._finite = self._direct = True
        # True: automatic, and gradients of different steps are not added up.
        self._all_direct = self._automatic is not None
        self._may_wait = False  # automatic: the encoder's last step, or a checkpoint, let some wait
        warn_if_little_can_wait(self._config, self._buckets.layers_of_model())

    def _prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        scaler: torch.amp.GradScaler | None,
    ) -> tuple[dict[str, Any], str]:
        """Check the arguments. Returns the settings that must be equal on all ranks, and a unique
        name for a group."""
        name, config = self.class_name(), self._config
        self._group = self._group_of_averages(model)
        if not isinstance(config, self.config_class):
            raise TypeError(f"config of {name} is a {self.config_class.__name__}, not {config!r}")
        config.check()
        if self._log_every is not None and self._log_every < 1:
            raise ValueError(f"log_every is at least 1, not {self._log_every}; None: no lines")
        layers_of = partial(self._layers_of, config)
        self._buckets = self._find_buckets(model, config.wire_dtype, layers_of)
        self._scaler = _enabled(scaler)
        if config.skip_update and optimizer is None:
            raise ValueError(
                "skip_update=True needs the optimizer, whose step(closure) it refuses: "
                f"{name}(..., optimizer=...)"
            )
        optimizers = None
        if optimizer is not None:
            optimizers = optimizers_with(optimizer, self._buckets.parameters, name)
        self._step_hooks = self._watch_steps(optimizers)
        self._residuals = Residuals(config.cache_dtype, recoverable=self._scaler is not None)
        settings = {"hook": self.hook_name} | vars(config) | {"scaler": self._scaler is not None}
        return settings, f"{self.hook_name}/{secrets.token_hex(8)}"

    def _new_automatic(self) -> Automatic | None:
        if self._config.ratio != AUTO:
            return None
        rank, ranks = self._group.rank(), self._group.size()
        warmup = self._warmup - self._statistics.steps
        even = self._config.sends_evenly
        return Automatic(self._averager, rank, ranks, warmup, even, self.logger)

    # -- what the state of a sharded model does in another way -----------------------------------

    @classmethod
    def class_name(cls) -> str:
        """Return the name that the caller used to make the state, for errors."""
        return cls.__name__

    def _group_of_everyone(self, model: nn.Module) -> dist.ProcessGroup:
        """Return the group of all ranks that make the state together. A bad argument of one of them
        raises on all of them."""
        ddp = model if isinstance(model, DistributedDataParallel) else None
        return group_to_report_in(None, ddp)

    def _group_of_averages(self, model: nn.Module) -> dist.ProcessGroup:
        """Return the group that averages. Raises TypeError or ValueError for a bad model."""
        ddp = check_wrapped(model, type(self).__name__)
        check_no_hook(ddp)
        return ddp.process_group

    def _find_buckets(
        self,
        model: nn.Module,
        wire: torch.dtype | None,
        layers_of: Callable[[Sequence[Shape]], list[Layer]],
    ) -> BucketSource:
        return Buckets(check_wrapped(model, self.class_name()), self.class_name(), wire, layers_of)

    def _check_alike(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if the settings of the ranks of _everyone do not fit together."""
        check_equal(settings)

    # -- what each hook implements itself --------------------------------------------------------

    @abstractmethod
    def _new_encoder(self) -> Encoder:
        """Make an encoder that has seen no step."""

    @staticmethod
    @abstractmethod
    def _layers_of(config: Any, shapes: Sequence[Shape]) -> list[Layer]:
        """Make layers of the parameters of a bucket."""

    def _watch_steps(self, optimizers: Collection[Optimizer] | None) -> list[StepHook]:
        """Make the hooks that run around the optimizers' steps.

        optimizers: the model's optimizers; None: every optimizer in this process
        """
        self._skipper = UpdateSkipper(optimizers) if self._config.skips_updates else None
        return [] if self._skipper is None else [self._skipper]

    # -- a step: the hook first, then the functions that it calls --------------------------------

    def exchange(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket: the work of the hook."""
        layers = self._buckets.open(bucket)
        if self._buckets.begins:
            self._begin_step()
        automatic, buffer = self._automatic, bucket.buffer()
        if automatic is None:
            average = self._average_all if self._direct else self._average_encoded
            future = average(layers, buffer)
        else:
            began = automatic.now()
            future = self._average_automatically(automatic, layers, buffer)
            future = automatic.watch(future, buffer, began)
        self._buckets.close(bucket)
        return future

    def _begin_step(self) -> None:
        self._settle()
        self._undecided = True
        self._finite = True
        self._clear_step_hooks()
        self._statistics.begin_step()
        if self._automatic is not None:
            self._begin_automatic_step(self._automatic)
            return
        whole = self._encoder.sends_all and not self._config.rounds
        self._direct = whole and self._residuals.empty

    def _begin_automatic_step(self, automatic: Automatic) -> None:
        automatic.begin_step()
        encodes = automatic.way is Way.ENCODED
        if self._may_wait and not encodes:
            self._encoder.forget_waiting()  # everything that waits is sent whole
        self._may_wait = encodes
        self._all_direct = automatic.way is Way.OFF and self._residuals.empty
        if self._all_direct:
            self._residuals.free()

    def _clear_step_hooks(self) -> None:
        for hook in self._step_hooks:
            hook.clear()

    def _average_automatically(
        self, automatic: Automatic, layers: BucketLayers, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket in the way of this step."""
        if automatic.encodes:
            return self._average_encoded(layers, buffer)
        narrow = automatic.way is Way.NARROW and not automatic.gave_up
        if not narrow and not self._residuals.hold(layers.names):
            return self._average_all(layers, buffer)
        wire = torch.bfloat16 if narrow and buffer.dtype == torch.float32 else buffer.dtype
        return self._average_encoded(layers.sent_as(wire), buffer, encode_whole)

    def _average_all(
        self, layers: BucketLayers, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the whole bucket, without error feedback."""
        everything = Encoded(range(len(layers.names)), None, (), 0)
        self._statistics.count(layers, everything, buffer)
        if self._automatic is None:
            self._encoder.pass_whole(layers)
        work = self._averager.start(self._averager.scaled(buffer))
        checks = self._scaler is not None and self._automatic is not None and not self._all_direct

        def check(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises the allreduce's error
            if checks and not is_finite(buffer):
                self._finite = False
            return buffer

        return work.then(check)

    def _average_encoded(
        self,
        layers: BucketLayers,
        buffer: torch.Tensor,
        encode: Callable[[Accumulated, Averager], Encoded] | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Add the bucket, unscaled, to the residuals, and average the choice of `encode`.

        encode: None: the encoder
        """
        gradients = [buffer[slice(*layers.range_of(i))] for i in range(len(layers.names))]
        factor = 1 / self._scale()
        sums, sizes = self._residuals.accumulate(
            layers.names, gradients, factor, self._encoder.squares
        )
        wire_factor = self._scale() * self._averager.factor(layers.wire)
        accumulated = Accumulated(
            layers, gradients, factor, sums, sizes, self._residuals, wire_factor
        )
        encoded = (encode or self._encoder.encode)(accumulated, self._averager)
        if self._scaler is None:
            warn_not_finite(layers.layers, layers.sums(encoded.residual_sums))
        self._statistics.count(layers, encoded, buffer)
        return self._send(layers, buffer, encoded, wire_factor)

    def _send(
        self, layers: BucketLayers, buffer: torch.Tensor, encoded: Encoded, wire_factor: float
    ) -> torch.futures.Future[torch.Tensor]:
        """Pack the parameters that are sent whole, and the code, at the bucket's beginning, and
        average this part. Then write the averages to the parameters' ranges of the bucket, and set
        all other ranges to zero. A code of integers takes an allreduce of its own."""
        whole, code = encoded.whole, encoded.code
        coded = () if code is None else code.parameters
        if self._skipper is not None:
            self._skipper.dropped += [
                self._buckets.parameters[name]
                for index, name in enumerate(layers.names)
                if index not in whole and index not in coded
            ]
        counts = [layers.counts[index] for index in whole]
        sent_whole, coded_part, wires = _wires(buffer, layers.wire, sum(counts), code)
        if not wires:
            buffer.zero_()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=None if buffer.is_cpu else [buffer.device]
            )
            done.set_result(buffer)
            return done
        self._residuals.pack([layers.names[index] for index in whole], sent_whole, wire_factor)
        if code is not None:
            code.take_out(coded_part)
        begins = [layers.begins[index] for index in whole]
        scale = self._scale()

        def spread(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises the allreduce's error
            if code is None:
                finite = unpack(sent_whole, buffer, begins, counts)
            else:
                # The wires are the beginning of the buffer.
                averages, sums = sent_whole.clone(), coded_part.clone()
                coded_ranges = [layers.range_of(index) for index in coded]
                finite = unpack_around(averages, buffer, begins, counts, coded_ranges)
                finite &= code.restore(sums, buffer, scale)
            if not finite:
                self._finite = False
            return buffer

        futures = [self._averager.start(wire) for wire in wires]
        all_done = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
        return all_done.then(spread)

    def _scale(self) -> float:
        """Return the factor by which the scaler has multiplied the gradients."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _settle(self) -> None:
        """Count the last step, or undo it if the scaler skipped it. Raises RuntimeError in the
        middle of a backward(), and ValueError if a parameter's shape or memory order has changed.
        """
        self._buckets.check_ended()
        if not self._all_direct:
            self._buckets.check_orders()
        if not self._undecided:
            return
        self._undecided = False
        if self._scaler is not None and not self._finite:
            self._residuals.roll_back()
            self._encoder.cancel_step()
            self._statistics.refuse_step()
            return
        self._residuals.commit()
        if self._automatic is None or self._automatic.encodes:
            self._encoder.end_step()
        else:
            self._encoder.cancel_step()
        self._statistics.end_step()
        steps = self._statistics.steps
        if self._log_every and steps % self._log_every == 0 and self._group.rank() == 0:
            self.logger.info("%s", self._statistics.line(self._encoder.summary()))

    # -- between steps ---------------------------------------------------------------------------

    def drain(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Average the residuals over the ranks, and apply them by one more step of each optimizer.

        The optimizers must together have all parameters of the model. All ranks call drain() after
        the last step. It clears the residuals and the gradients.

        If a rank's optimizers lack a parameter, or a step() needs a closure, this rank raises
        ValueError or TypeError and every other rank RuntimeError. If an average overflows its
        dtype, every rank raises OverflowError. In both cases nothing has changed. If a step()
        raises, the averages are in .grad, and no longer in the residuals.
        """
        self._settle()
        optimizers: list[Optimizer] = []
        together(
            self._everyone,
            lambda: optimizers.extend(optimizers_to_drain(optimizer, self._buckets.parameters)),
        )
        averages: dict[str, torch.Tensor] = {}
        together(
            self._everyone,
            lambda: averages.update(
                average_residuals(self._residuals, self._buckets.parts, self._averager)
            ),
        )
        self._residuals.load_state_dict([], self._buckets.parts)
        set_gradients(self._buckets.parameters, averages)
        self._encoder.forget_waiting()
        self._clear_step_hooks()
        step_and_clear(optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's checkpoint. Call it on every rank, between two iterations.

        A checkpoint has the residuals of one rank, by parameter, in the parameters' shapes. Save
        the checkpoints of all ranks.
        """
        self._settle()
        return {
            "hook": self.hook_name,
            "rank": self._group.rank(),
            "ranks": self._group.size(),
            "names": list(self._buckets.parameters),
            "rule": self._encoder.state_dict(),
            "caches": self._residuals.state_dict(self._buckets.parts),
            "statistics": self._statistics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint. All ranks call it, between two iterations.

        Args:
            state: this rank's state; or a sequence of the states of all ranks that saved. The
                sequence is needed if the number of ranks has changed. Its residuals are distributed
                and added up, so that the sum over the ranks stays the same.

        Raises ValueError for the state of another hook, model, rank or number of ranks; then
        nothing has changed.
        """
        self._settle()
        parameters = self._buckets.parameters
        own = own_share(
            state, self._group.rank(), self._group.size(), list(parameters), {"hook", "statistics"}
        )
        hooks = {one["hook"] for one in (*own.states, own.common)}
        if hooks != {self.hook_name}:
            raise ValueError(
                f"the checkpoint is of {' and '.join(sorted(hooks))}, and this "
                f"{type(self).__name__} is of {self.hook_name}: use the hook that saved it"
            )
        encoder, statistics = self._new_encoder(), Statistics()
        try:
            encoder.load_state_dict(own.common["rule"])
            statistics.load_state_dict(own.common["statistics"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the state is damaged ({type(error).__name__}: {error}): load the result of "
                "state_dict()"
            ) from error
        caches = [one["caches"] for one in own.states]
        # All ranks hold residuals of the same names, because they decide by them what to send.
        names = [name for name in parameters if any(name in one["caches"] for one in own.all)]
        self._residuals.load_state_dict(caches, self._buckets.parts, names)
        self._encoder, self._statistics = encoder, statistics
        self._automatic = self._new_automatic()
        self._all_direct = False
        self._may_wait = True

    def summary(self) -> dict[str, float]:
        """Return this rank's counters.

        Some counters are sums since the start. `steps` does not include `refused_steps`, which the
        scaler skipped. DDP alone would have sent `gradient_bytes`; the hook sent `sent_bytes`,
        which include decisions. `sent_share` is the sent part of the gradients' elements.

        In the last step there were `layers`; of `sent_layers` at least one parameter was sent
        whole. At present `waiting` parameters wait, with `mean_age` and `oldest_age` in steps.
        `cache_norm` is the residuals' L2 norm. With layer dropping: `threshold` (-1: none).

        With ratio="auto", `chosen_ratio` is 0 (everything is sent whole), 0.5 (as bfloat16) or 0.9.
        `chosen_step_seconds` is the time of a step in that way. `plain_step_seconds` is the time of
        a step that sends everything whole, of which it waits `plain_wait_seconds` for
        communication. All four are -1 until the first choice.
        """
        self._settle()
        ages = self._encoder.waited.values()
        counts = self._statistics.summary() | self._encoder.summary()
        if self._automatic is not None:
            counts |= self._automatic.summary()
        return counts | {
            "waiting": len(ages),
            "mean_age": sum(ages) / max(len(ages), 1),
            "oldest_age": max(ages, default=0),
            "cache_norm": self._residuals.norm(),
        }


def _wires(
    buffer: torch.Tensor, dtype: torch.dtype, whole: int, code: Code | None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Divide the beginning of a bucket among the elements that are sent.

    Args:
        dtype: of the parameters that are sent whole, and of a code that has no dtype of its own
        whole: elements of the parameters that are sent whole

    Returns the part of the parameters that are sent whole, the part of the code, and the tensors to
    average, none of which is empty.
    """
    wide = buffer.view(dtype)
    numel = 0 if code is None else code.numel
    if code is None or code.dtype is None:
        wires = [wide[: whole + numel]]
        coded = wide[whole : whole + numel]
    else:
        begin = whole * dtype.itemsize // code.dtype.itemsize
        coded = buffer.view(code.dtype)[begin : begin + numel]
        wires = [wide[:whole], coded]
    return wide[:whole], coded, [wire for wire in wires if wire.numel()]


def run_hook(
    kind: type[ErrorFeedbackState[Any]], state: object, bucket: object, shards: Sequence[object]
) -> torch.futures.Future[torch.Tensor]:
    """Call state.exchange(bucket), for the hook whose states are of the class `kind`.

    Raises TypeError for another state, and under FullyShardedDataParallel, which passes shards.
    """
    if shards or not isinstance(bucket, GradBucket):
        raise TypeError(
            f"{kind.hook_name} is for DistributedDataParallel, and FullyShardedDataParallel has "
            "called it: there each rank has a part of the gradients only"
        )
    if not isinstance(state, kind):
        raise TypeError(
            f"{kind.hook_name} is registered with a {kind.__name__}, not with "
            f"{type(state).__name__}: ddp.register_comm_hook({kind.__name__}(ddp), "
            f"{kind.hook_name})"
        )
    return state.exchange(bucket)


def _enabled(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """Return the scaler; None if there is none or it is disabled. Raises TypeError for another
    object."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}")
    return scaler if scaler is not None and scaler.is_enabled() else None
