"""Decides which layers are sent, and which are dropped.

In each step a layer has a layer sum: the L1 sum (the L2 sum, of squares, for "l2") of its
accumulated gradient. A layer's score follows from its sum, and DropRule._is_sent compares the score
with a threshold. DropRule._search finds the threshold (Lee et al. 2020, Algorithm 1), and
DropRule._follow moves it.

The rule is deterministic: rules of equal configuration return the same for the same sequence of
calls. Under DDP each rank has a rule, and passes averages over all ranks. Each worker of a
parameter server has a rule, and passes its own sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from torch_hbmcomm import native
from torch_hbmcomm.error_feedback.config import AUTO
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.layer_drop.config import LayerDrop

NO_THRESHOLD = -1.0

# The gains of DropRule._follow, a PI controller that moves the threshold's logarithm so that a part
# 1 - R of the bytes is sent. In a simulation with ResNet-50's layers
# (papers/layer_drop/feedback.py), gradients shrank by 2.3 % a step. The mean share that was sent in
# 200 steps was still within a percentage point of 1 - R. Without the integral part the mean lags
# behind 1 - R. With larger gains the bytes vary more between steps.
_PROPORTIONAL = 0.05
_INTEGRAL = 0.005
# The bound of the debt, in budgets of a step. Layers that are always sent may exceed the budget in
# every step. Without a bound the debt would then grow for ever.
_MOST_DEBT = 10.0


def layers_of(shapes: Sequence[Shape], config: LayerDrop) -> list[Layer]:
    """Group parameters into layers by config.granularity, in the order of their first members."""
    members: dict[str, list[int]] = {}
    for index, shape in enumerate(shapes):
        module = config.granularity == "module"
        key = shape.name.rpartition(".")[0] if module else shape.name
        members.setdefault(key, []).append(index)
    found = []
    for indices in members.values():
        sent_whole = _is_sent_whole([shapes[index] for index in indices], config.least_numel)
        found.append(Layer.of(shapes, indices, always=config.always_send and sent_whole))
    return found


def _is_sent_whole(shapes: Sequence[Shape], min_numel: int) -> bool:
    """Return True if the parameters have fewer than min_numel elements together, or if each of them
    has at most one dimension."""
    numel = sum(shape.numel for shape in shapes)
    return numel < min_numel or all(shape.dimensions < 2 for shape in shapes)


class DropRule:
    """Decides step by step: decide() for all layers, in one call or several, then end_step().

    threshold: the threshold of the next decision; NO_THRESHOLD: everything is sent
    """

    def __init__(self, config: LayerDrop) -> None:
        self._config = config
        self._restart()

    def _restart(self) -> None:
        fixed = self._config.fixed_threshold
        self.threshold = NO_THRESHOLD if fixed is None else fixed
        self._steps = 0
        self._debt = 0.0  # bytes sent beyond the budgets so far, in budgets of a step
        self._waited: dict[str, int] = {}  # steps without sending, of each parameter that waits
        self._begin_step()

    def _begin_step(self) -> None:
        self._found: list[tuple[float, int]] = []  # score and elements of each layer so far
        self._bytes = self._sent_bytes = 0
        self._next = dict(self._waited)

    @property
    def sends_all(self) -> bool:
        """True if this step sends everything and needs no layer sums."""
        if self._config.ratio == 0:
            return self._config.fixed_threshold is None
        return self._steps < self._config.warmup and not self._searches

    @property
    def waited(self) -> dict[str, int]:
        """Steps since each waiting parameter was sent, by its name."""
        return self._waited

    def decide(
        self, layers: Sequence[Layer], layer_sums: Sequence[float], idle: Collection[str] = ()
    ) -> list[bool]:
        """Decide for each layer whether it is sent in this step.

        Args:
            layers: the layers of a bucket, or of the whole model
            layer_sums: the sum of each layer; under DDP it is averaged over all ranks
            idle: names of parameters without a new gradient in this step; they wait, even if the
                rest of their layer is sent
        """
        return [self._decide(*one, idle) for one in zip(layers, layer_sums, strict=True)]

    def _decide(self, layer: Layer, layer_sum: float, idle: Collection[str]) -> bool:
        awake = [name for name in layer.parameters if name not in idle]
        waited = max((self._waited.get(name, 0) for name in awake), default=0)
        score = self._score(layer, layer_sum)
        if awake:
            self._found.append((score, layer.numel))
        sent = bool(awake) and self._is_sent(layer, score, waited)
        for name in layer.parameters:
            if layer_sum == 0 or (sent and name not in idle):
                self._next.pop(name, None)
            else:
                self._next[name] = self._waited.get(name, 0) + 1
        self._bytes += layer.nbytes
        self._sent_bytes += layer.nbytes if sent else 0
        return sent

    def _is_sent(self, layer: Layer, score: float, waited: int) -> bool:
        """Return True if a layer with this score is sent, after `waited` steps.

        A layer of zeros is never sent. A layer whose score is not finite is always sent, to show
        the error. A layer that is `always` sent, or at its age limit, is sent. Every layer is sent
        in the warm-up, and before a threshold exists. For other layers the score must reach the
        threshold (equation 2). A threshold that follows the bytes sinks with `waited`.
        """
        if score == 0:
            return False
        if not math.isfinite(score) or layer.always or self._steps < self._config.warmup:
            return True
        if self.threshold == NO_THRESHOLD or waited >= self._config.oldest:
            return True
        threshold = self.threshold
        if self._follows_bytes:
            threshold *= 1 - (waited / self._config.oldest) ** 2
        return score >= threshold

    def _score(self, layer: Layer, layer_sum: float) -> float:
        if self._config.representative == "l1" or layer_sum == 0:
            return layer_sum
        if self._config.representative == "l2":
            return math.sqrt(layer_sum)
        return layer_sum / layer.numel

    def end_step(self, overhead: int = 0) -> None:
        """End the step, and set the threshold of the next step.

        REQUIRES: decide() was called for all layers.

        overhead: bytes that were sent besides the layers
        """
        excess = 0.0
        if self._follows_bytes and self._bytes:
            excess = (self._sent_bytes + overhead) / ((1 - self._config.unsent) * self._bytes) - 1
            self._debt = min(max(self._debt + excess, -_MOST_DEBT), _MOST_DEBT)
        if self._searches:
            self._search()
        elif self._follows_bytes:
            self._follow(excess)
        self._waited = self._next
        self._steps += 1
        self._begin_step()

    @property
    def _searches(self) -> bool:
        if self._config.fixed_threshold is not None or self._config.ratio == 0:
            return False
        since = self._steps - max(self._config.warmup, 1) + 1
        return since >= 0 and since % self._config.every == 0

    def _search(self) -> None:
        """Find the threshold that lets (1 - R) of all elements through (Algorithm 1).

        Layers are dropped in ascending order of their scores, as in the paper's text.
        """
        scores, sizes = zip(*self._found, strict=True) if self._found else ((), ())
        found = native.load().layerdrop_threshold(list(scores), list(sizes), self._config.unsent)
        if found != NO_THRESHOLD and math.isfinite(found):
            self.threshold = found

    @property
    def _follows_bytes(self) -> bool:
        config = self._config
        return (
            config.target == "bytes"
            and config.fixed_threshold is None
            and self.threshold > NO_THRESHOLD
        )

    def _follow(self, excess: float) -> None:
        """Raise the threshold if more bytes were sent than the budget; lower it if fewer were sent.

        A PI controller: `excess`, of this step, is the proportional term. _debt, the sum over all
        steps, is the integral term. The threshold stays within a factor of 2 of the layers' scores,
        so that it returns to them soon.
        """
        found = [score for score, _ in self._found if 0 < score < math.inf]
        if found:
            moved = self.threshold * math.exp(_PROPORTIONAL * excess + _INTEGRAL * self._debt)
            self.threshold = min(max(moved, min(found) / 2), max(found) * 2)

    def cancel_step(self) -> None:
        """Forget all decisions since the last end_step()."""
        self._begin_step()

    def forget_waiting(self) -> None:
        """Forget the parameters that wait. With ratio="auto" also forget the threshold: when the
        encoder's steps continue, gradients may be much smaller, and nothing waits."""
        if self._config.ratio == AUTO:
            self._restart()
        self._waited.clear()
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for load_state_dict(). Call it between two steps."""
        return {
            "representative": self._config.representative,
            "steps": self._steps,
            "threshold": self.threshold,
            "debt": self._debt,
            "waited": dict(self._waited),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the saved rule.

        Raises ValueError for an incomplete state, or another `representative`; then nothing has
        changed.
        """
        if missing := {"representative", "steps", "debt", "waited", "threshold"} - set(state):
            raise ValueError(
                f"the state of layer dropping lacks {', '.join(sorted(missing))}: load the result "
                "of state_dict()"
            )
        if state["representative"] != self._config.representative:
            raise ValueError(
                f'the checkpoint is of representative="{state["representative"]}", whose threshold '
                f'means nothing to "{self._config.representative}": use the same one'
            )
        steps, debt = int(state["steps"]), float(state["debt"])
        threshold = float(state["threshold"])
        self._waited = {name: int(steps) for name, steps in state["waited"].items()}
        self._steps, self._debt = steps, debt
        if self._config.fixed_threshold is None:
            self.threshold = threshold
        self._begin_step()
