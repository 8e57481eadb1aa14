"""Decides which blocks of a parameter are sent in a step.

A parameter of two dimensions or more is cut into blocks of consecutive elements in memory. Each
parameter sends the same part of its blocks in a step. The budget of bytes sets this part. The
blocks with the highest scores go. A block's score is the norm of its residual, divided by the usual
norm of one step's gradient.

The rule is deterministic, and it does not depend on DDP's buckets. It gets means over the ranks, so
all ranks decide alike.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.packing import Packing

_MOST_WHOLE = 0.5

_LEAST_BLOCKS = 8  # blocks of a parameter, if it has as many elements

NUMBER = 4
"""Bytes of a number that ranks average to choose: a float32."""

# The usual norm of a block is a running mean over the block's first gradients after it was sent.
_USUAL_DECAY = 0.5
# The least usual norm, as a part of the mean over the parameter's blocks. A block whose gradients
# were zero would otherwise go before all others at its first gradient.
_LEAST_USUAL = 0.1


def layers_of(shapes: Sequence[Shape], config: LayerDrop) -> list[Layer]:
    """Return each parameter as a layer; `always` if it is always sent whole.

    Without `min_numel`, matrices below its default are sent whole, the smallest first. All that is
    sent whole then takes at most the part _MOST_WHOLE of the bytes of a step.
    """
    whole = {i for i, one in enumerate(shapes) if one.dimensions < 2 or one.numel < 2}
    if config.min_numel is not None:
        whole |= {i for i, one in enumerate(shapes) if one.numel < config.min_numel}
    else:
        sizes = [one.numel * one.width for one in shapes]
        left = _MOST_WHOLE * (1 - config.unsent) * sum(sizes) - sum(sizes[i] for i in whole)
        for index in sorted(set(range(len(shapes))) - whole, key=sizes.__getitem__):
            left -= sizes[index]
            if shapes[index].numel < config.least_numel and left >= 0:
                whole.add(index)
    return [Layer.of(shapes, (index,), always=index in whole) for index in range(len(shapes))]


def size_of(numel: int, config: LayerDrop) -> int:
    """Return the number of elements of a parameter's blocks. The last block may be shorter."""
    return min(config.block_size, -(-numel // _LEAST_BLOCKS))


@dataclass(frozen=True)
class Blocks:
    """The blocks of a parameter that a step sends.

    indices: int64, in ascending order.
    ages: float64, for each of these blocks: the number of steps whose gradients it sends.
    """

    indices: torch.Tensor
    ages: torch.Tensor


class BlockRule:
    """Decides step by step: choose() for each parameter that is cut, then end_step().

    layers: the layers of the whole model, as layers_of() returns them
    ranks: the number of ranks
    """

    def __init__(self, config: LayerDrop, layers: Sequence[Layer], ranks: int) -> None:
        self._config = config
        self._packing = None if config.levels is None else Packing(config.levels, ranks)
        self._cut = {layer.name: layer for layer in layers if not layer.always}
        self._whole = sum(layer.nbytes for layer in layers)
        always = sum(layer.nbytes for layer in layers if layer.always)
        self._cut_bytes = sum(self._bytes_of(layer) for layer in self._cut.values())
        numbers = 2 * len(layers) + sum(self.blocks(one.numel) for one in self._cut.values())
        self._fixed = always + NUMBER * numbers  # bytes of every step
        self._steps = 0
        self._ages: dict[str, torch.Tensor] = {}
        self._usual: dict[str, torch.Tensor] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._next_ages: dict[str, torch.Tensor] = {}
        self._next_usual: dict[str, torch.Tensor] = {}

    def packing_of(self, width: float) -> Packing | None:
        """Return the packing of blocks whose elements have `width` bytes; None: they are sent as
        they are."""
        return self._packing if width == torch.float32.itemsize else None

    def _bytes_of(self, layer: Layer) -> float:
        """Return the bytes of all blocks of a layer on the wire."""
        packing = self.packing_of(layer.nbytes / layer.numel)
        return layer.nbytes if packing is None else layer.numel * packing.element_bytes

    def blocks(self, numel: int) -> int:
        """Return the number of blocks of a parameter."""
        return -(-numel // size_of(numel, self._config))

    @property
    def sends_all(self) -> bool:
        """True if this step sends everything, and needs no choice."""
        return self._config.ratio == 0 or self._steps < self._config.warmup

    @property
    def waited(self) -> Mapping[str, int]:
        """Steps since the oldest waiting block of each parameter was sent, by the parameter's
        name."""
        oldest = {name: int(ages.max()) for name, ages in self._ages.items()}
        return {name: age for name, age in oldest.items() if age > 0}

    def _part(self, step: int) -> float:
        """Return the part of each parameter's blocks that the steps before `step` send, added up.

        Without `warmup`, the first 1 / (1 - R) steps send additional bytes: together the part R of
        all bytes, as low_rank_hook does. Each step sends 1 / max_age of the blocks at least,
        even if that exceeds the budget. So no block waits longer than twice max_age.
        """
        ratio, warmup = self._config.unsent, self._config.warmup
        steady = ((1 - ratio) * self._whole - self._fixed) / self._cut_bytes
        early = round(1 / (1 - ratio))
        begun = min(step, early) / early if warmup == 0 else 0.0
        steady = max(steady, 1 / self._config.oldest)
        return step * steady + begun * ratio * self._whole / self._cut_bytes

    def count(self, layer: Layer) -> int:
        """Return the number of blocks of a parameter that this step sends.

        The parameters' counts are rounded at different steps, so that steps send about equal bytes.
        """
        blocks = self.blocks(layer.numel)
        if self.sends_all:
            return blocks
        phase = zlib.crc32(layer.name.encode()) / 2**32
        begin, end = (
            math.floor(blocks * self._part(step) + phase) for step in (self._steps, self._steps + 1)
        )
        return min(end - begin, blocks)

    def choose(self, layer: Layer, norms: torch.Tensor) -> Blocks:
        """Choose the blocks of a parameter that are sent.

        norms: float32, for each block: the L2 norm of its residual, the root of the mean square
            over the ranks. All blocks are sent if one is not finite.
        """
        name = layer.name
        ages = self._ages.get(name, torch.zeros(len(norms), dtype=torch.float64)) + 1
        usual = self._usual_norms(name, norms, ages)
        if not norms.isfinite().all():
            usual, chosen = torch.ones_like(norms), torch.arange(len(norms))
        else:
            scores = norms / usual.clamp(min=max(_LEAST_USUAL * float(usual.mean()), 1e-30))
            # Blocks beyond the age limit go first, the oldest before all others.
            scores = torch.where(ages > self._config.oldest, 1e30 * ages.float(), scores)
            order = torch.sort(scores, descending=True, stable=True).indices
            chosen = order[: self.count(layer)].sort().values
        found = Blocks(chosen, ages[chosen])
        ages[chosen] = 0
        self._next_ages[name], self._next_usual[name] = ages, usual
        return found

    def _usual_norms(self, name: str, norms: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
        """Return the usual norm of each block. A block of age 1 has the gradient of one step only,
        and updates it."""
        before = self._usual.get(name)
        if before is None:
            return norms.clone()
        mixed = _USUAL_DECAY * before + (1 - _USUAL_DECAY) * norms
        return torch.where(ages == 1, mixed, before)

    def send_all(self, layer: Layer) -> Blocks:
        """Send all blocks of a parameter, without a choice."""
        ages = self._ages.get(layer.name)
        blocks = self.blocks(layer.numel)
        ages = torch.zeros(blocks, dtype=torch.float64) if ages is None else ages
        self._next_ages[layer.name] = torch.zeros_like(ages)
        return Blocks(torch.arange(blocks), ages + 1)

    def end_step(self) -> None:
        """End the step."""
        self._ages |= self._next_ages
        self._usual |= self._next_usual
        self._steps += 1
        self._begin_step()

    def cancel_step(self) -> None:
        """Forget everything since the last end_step()."""
        self._begin_step()

    def forget_waiting(self) -> None:
        """Forget the blocks that wait."""
        self._ages.clear()
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for load_state_dict(). Call it between two steps."""
        return {
            "block": self._config.block_size,
            "steps": self._steps,
            "ages": {name: ages.clone() for name, ages in self._ages.items()},
            "usual": {name: usual.clone() for name, usual in self._usual.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the saved rule. Raises ValueError for the state of another target, or of
        blocks of another size."""
        if missing := {"block", "steps", "ages", "usual"} - set(state):
            raise ValueError(
                f"the state lacks {', '.join(sorted(missing))}: it is of another target than "
                '"blocks", or damaged'
            )
        if state["block"] != self._config.block_size:
            raise ValueError(
                f"the checkpoint is of blocks of {state['block']} elements, and this state has "
                f"blocks of {self._config.block_size}: use block={state['block']}"
            )
        self._steps = int(state["steps"])
        self._ages = {name: ages.clone() for name, ages in state["ages"].items()}
        self._usual = {name: usual.clone() for name, usual in state["usual"].items()}
        self._begin_step()
