"""States with ratio="auto": one whose encoder loses no bit, and scripts instead of measurements."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from harness.hooks import Hooked, hooked
from harness.layer_drop_ddp import wrapped
from torch_hbmcomm.error_feedback import automatic
from torch_hbmcomm.error_feedback.automatic import Found, Step, Times, Way
from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.config import EncoderConfig
from torch_hbmcomm.error_feedback.encoder import Accumulated, Encoded
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.error_feedback.state import ErrorFeedbackState, run_hook


@dataclass(frozen=True, kw_only=True)
class Turns(EncoderConfig):
    """Each step sends every second parameter of a bucket whole. It also sends gradients that are
    not finite."""

    min_numel: int = 0

    sent_whole: ClassVar[str] = "no element"


class TurnsEncoder:
    squares = False
    sends_all = False

    def __init__(self) -> None:
        self._steps = 0
        self.waited: dict[str, int] = {}

    def encode(self, bucket: Accumulated, averager: Averager) -> Encoded:
        numbers = torch.tensor([bucket.residual_sums, bucket.sizes], dtype=torch.float64)
        sums, sizes = averager.agree(numbers).tolist()
        goes = [
            index
            for index, (total, size) in enumerate(zip(sums, sizes, strict=True))
            if not math.isfinite(total) or (size != 0 and index % 2 == self._steps % 2)
        ]
        return Encoded(goes, None, sums, numbers.nbytes)

    def pass_whole(self, layers: BucketLayers) -> None: ...

    def end_step(self) -> None:
        self._steps += 1

    def cancel_step(self) -> None: ...

    def forget_waiting(self) -> None: ...

    def summary(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class TurnsState(ErrorFeedbackState[Turns]):
    hook_name = "turns_hook"
    config_class = Turns
    logger = logging.getLogger("turns")

    def __init__(
        self, ddp: DistributedDataParallel, config: Turns, scaler: torch.amp.GradScaler | None
    ) -> None:
        super().__init__(ddp, config, optimizer=None, scaler=scaler, log_every=None)

    def _new_encoder(self) -> TurnsEncoder:
        return TurnsEncoder()

    @staticmethod
    def _layers_of(config: Turns, shapes: Sequence[Shape]) -> list[Layer]:
        return [Layer.of(shapes, (index,), always=False) for index in range(len(shapes))]


def turns_hook(state, bucket):  # type: ignore[no-untyped-def]
    return run_hook(TurnsState, state, bucket, ())


def turning(
    model: torch.nn.Module,
    *,
    ddp_options: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    **settings: Any,
) -> tuple[DistributedDataParallel, TurnsState]:
    """Wrap a model with a TurnsState. settings: the arguments of Turns, by default ratio="auto"."""
    ddp = wrapped(model, **(ddp_options or {}))
    state = TurnsState(ddp, Turns(**({"ratio": "auto"} | settings)), scaler)
    ddp.register_comm_hook(state, turns_hook)
    return ddp, state


KINDS: dict[str, dict[str, Any]] = {
    "low_rank": {},
    "bytes": {},
    "paper": {"always_send": False},
    "blocks": {},
    "levels": {"levels": 1},
}
"""Settings of hooks with ratio="auto". "levels" is target="blocks" with whole numbers."""

EXACT = ("turns", "bytes", "paper", "blocks", "levels")
"""Encoders that lose no bit of whole numbers."""


def choosing(
    model: torch.nn.Module, kind: str, *, ddp_options: Any = None, **options: Any
) -> tuple[DistributedDataParallel, Hooked | TurnsState]:
    """Wrap a model with a hook that has ratio="auto". kind: "turns", or one of KINDS."""
    if kind == "turns":
        return turning(model, ddp_options=ddp_options, **options)
    ddp = wrapped(model, **(ddp_options or {}))
    target = "blocks" if kind == "levels" else kind
    return ddp, hooked(ddp, target, **({"ratio": "auto"} | KINDS[kind] | options))


@contextmanager
def scripted(steps: Collection[Step], chosen: Way = Way.OFF) -> Iterator[None]:
    """Let every state with ratio="auto" that is made or loaded in the block take these steps, and
    then choose `chosen`."""

    def trials(current: Way, warm: int = 0, even: bool = True) -> Generator[Step, Times, Found]:
        yield from (step for step in steps)  # a list would not take the times
        return Found({Way.OFF: 1.0, chosen: 0.5} if chosen is not Way.OFF else {chosen: 1.0}, 0.1)

    with mock.patch.object(automatic, "trials", trials):
        yield
