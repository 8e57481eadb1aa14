"""Error feedback works with a third encoder, which sends one half of a gradient in each step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.layer_drop_ddp import SHAPES, Weighted, backward, gradients, residuals_of, wrapped
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.config import EncoderConfig
from torch_hbmcomm.error_feedback.encoder import Accumulated, Encoded
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.error_feedback.state import ErrorFeedbackState, run_hook

pytestmark = pytest.mark.ranks(1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Halves(EncoderConfig):
    min_numel: int = 2

    sent_whole: ClassVar[str] = "one element"


class HalfCode:
    """Every second element of each parameter, from `first` on."""

    dtype: torch.dtype | None = None

    def __init__(self, bucket: Accumulated, parameters: Sequence[int], first: int) -> None:
        self.parameters = parameters
        self._bucket = bucket
        self._first = first

    def _halves(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [flat[self._first :: 2] for flat in flats]

    @property
    def _counts(self) -> list[int]:
        counts = self._bucket.layers.counts
        return [len(range(self._first, counts[index], 2)) for index in self.parameters]

    @property
    def numel(self) -> int:
        return sum(self._counts)

    @property
    def elements(self) -> int:
        return self.numel

    def take_out(self, wire: torch.Tensor) -> None:
        names = [self._bucket.layers.names[index] for index in self.parameters]
        flats = [self._bucket.residuals.accumulated(name) for name in names]
        for half, part in zip(self._halves(flats), wire.split(self._counts), strict=True):
            part.copy_(half * self._bucket.wire_factor)
            half.zero_()

    def restore(self, wire: torch.Tensor, buffer: torch.Tensor, scale: float) -> bool:
        ranges = [self._bucket.layers.range_of(index) for index in self.parameters]
        flats = [buffer[begin:end].zero_() for begin, end in ranges]
        for half, part in zip(self._halves(flats), wire.split(self._counts), strict=True):
            half.copy_(part)
        return bool(wire.isfinite().all())


class HalvesEncoder:
    squares = False
    sends_all = False

    def __init__(self) -> None:
        self._steps = 0
        self.waited: Mapping[str, int] = {}

    def encode(self, bucket: Accumulated, averager: Averager) -> Encoded:
        layers = bucket.layers.layers
        whole = [index for index, layer in enumerate(layers) if layer.always]
        coded = [index for index, layer in enumerate(layers) if not layer.always]
        return Encoded(whole, HalfCode(bucket, coded, self._steps % 2), bucket.residual_sums, 0)

    def pass_whole(self, layers: BucketLayers) -> None: ...

    def end_step(self) -> None:
        self._steps += 1

    def cancel_step(self) -> None: ...

    def forget_waiting(self) -> None: ...

    def summary(self) -> dict[str, float]:
        return {"half": self._steps % 2}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class HalvesState(ErrorFeedbackState[Halves]):
    hook_name = "halves_hook"
    config_class = Halves
    logger = logging.getLogger("halves")

    def __init__(self, ddp: DistributedDataParallel, config: Halves) -> None:
        super().__init__(ddp, config, optimizer=None, scaler=None, log_every=None)

    def _new_encoder(self) -> HalvesEncoder:
        return HalvesEncoder()

    @staticmethod
    def _layers_of(config: Halves, shapes: Sequence[Shape]) -> list[Layer]:
        return [
            Layer.of(shapes, (index,), always=shape.numel < config.min_numel)
            for index, shape in enumerate(shapes)
        ]


def halves_hook(state, bucket):  # type: ignore[no-untyped-def]
    return run_hook(HalvesState, state, bucket, ())


def send_halves(context: Context) -> None:
    """Sent plus residual equals all gradients. A checkpoint continues with the other half."""
    ddp = wrapped(Weighted())
    state: Any = HalvesState(ddp, Halves(ratio=0.5))
    ddp.register_comm_hook(state, halves_hook)
    sent = [torch.zeros(shape) for shape in SHAPES]
    computed = [torch.zeros(shape) for shape in SHAPES]
    for step in range(5):
        if step == 3:
            state.load_state_dict(state.state_dict())
        own = gradients(context.seed, context.rank, step, context.size)
        for index, came in enumerate(backward(ddp, [*own])):
            assert came is not None
            computed[index] += own[index]
            sent[index] += came * context.size
            first = (step + 1) % 2
            assert came.numel() == 1 or not came.flatten()[first::2].any()
    for index, residual in enumerate(residuals_of(state)):
        both = torch.stack([residual, computed[index]])
        dist.all_reduce(both)
        assert_same(sent[index] + both[0], both[1], f"sent and residual of parameter {index}")
    counts = state.summary()
    assert counts["half"] == 1
    assert counts["sent_share"] == pytest.approx(0.5, abs=0.01)


def test_another_encoder(pool: Pool) -> None:
    pool.run(send_halves)
