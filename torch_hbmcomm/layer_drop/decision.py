"""Decides which layers are sent, and which are dropped.

In each step a layer has a moment: the sum of the absolute values (of the squares for "l2") of its
accumulated gradient. DropRule._is_sent is the decision; the threshold that it compares with is
searched for in DropRule._search (Lee et al. 2020, Algorithm 1) and moved in DropRule._follow.

The rule is deterministic: rules of equal configuration that are asked the same in the same order
give the same answers. Under DDP each rank has one and feeds it averages over all ranks; each worker
of a parameter server has one and feeds it what it has itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from torch_hbmcomm import native
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.layer_drop.config import LayerDrop

NO_THRESHOLD = -1.0

# The feedback on bytes, a PI controller of the threshold's logarithm. With ResNet-50's layers, even
# when gradients shrink by 2.3 % a step, the mean over 200 steps stays within a point of 1 - R
# (papers/layer_drop/feedback.py). Without the integral it lags behind; larger gains send less
# evenly.
_PROPORTIONAL = 0.05
_INTEGRAL = 0.005
_MOST_DEBT = 10.0  # steps' budgets: where always-sent layers exceed the budget, nothing helps


def layers_of(shapes: Sequence[Shape], config: LayerDrop) -> list[Layer]:
    """Group parameters into layers by config.granularity, in the order of their first members."""
    members: dict[str, list[int]] = {}
    for index, shape in enumerate(shapes):
        module = config.granularity == "module"
        key = shape.name.rpartition(".")[0] if module else shape.name
        members.setdefault(key, []).append(index)
    found = []
    for indices in members.values():
        small = _is_small([shapes[index] for index in indices], config.min_numel)
        found.append(Layer.of(shapes, indices, always=config.always_send and small))
    return found


def _is_small(shapes: Sequence[Shape], min_numel: int) -> bool:
    """Return True for parameters that have too few elements, or all one dimension."""
    numel = sum(shape.numel for shape in shapes)
    return numel < min_numel or all(shape.dimensions < 2 for shape in shapes)


class DropRule:
    """Decides step by step: decide() for all layers, in one call or several, then end_step().

    threshold: for the next decision; NO_THRESHOLD: everything is sent
    """

    def __init__(self, config: LayerDrop) -> None:
        self._config = config
        fixed = config.fixed_threshold
        self.threshold = NO_THRESHOLD if fixed is None else fixed
        self._steps = 0
        self._debt = 0.0  # bytes that were sent too much so far, in budgets of a step
        self._waited: dict[str, int] = {}  # by parameter; those that wait
        self._begin_step()

    def _begin_step(self) -> None:
        self._found: list[tuple[float, int]] = []  # of layers in this step: representative, size
        self._bytes = self._sent_bytes = 0
        self._next = dict(self._waited)

    @property
    def sends_all(self) -> bool:
        """Whether this step sends everything and needs no moments."""
        if self._config.ratio == 0:
            return self._config.fixed_threshold is None
        return self._steps < self._config.warmup and not self._searches

    @property
    def waited(self) -> dict[str, int]:
        """Steps since each waiting parameter was sent, by its name."""
        return self._waited

    def decide(
        self, layers: Sequence[Layer], moments: Sequence[float], idle: Collection[str] = ()
    ) -> list[bool]:
        """Decide for each layer whether it is sent in this step.

        Args:
            layers: those of a bucket or of the whole model
            moments: one for each layer, averaged over those who decide alike
            idle: names of parameters that got nothing new in this step; they wait, also when the
                rest of their layer is sent
        """
        return [self._decide(*one, idle) for one in zip(layers, moments, strict=True)]

    def _decide(self, layer: Layer, moment: float, idle: Collection[str]) -> bool:
        awake = [name for name in layer.parameters if name not in idle]
        waited = max((self._waited.get(name, 0) for name in awake), default=0)
        value = self._representative(layer, moment)
        if awake:
            self._found.append((value, layer.numel))
        sent = bool(awake) and self._is_sent(layer, value, waited)
        for name in layer.parameters:
            if moment == 0 or (sent and name not in idle):
                self._next.pop(name, None)
            else:
                self._next[name] = self._waited.get(name, 0) + 1
        self._bytes += layer.nbytes
        self._sent_bytes += layer.nbytes if sent else 0
        return sent

    def _is_sent(self, layer: Layer, value: float, waited: int) -> bool:
        """Return whether a layer with this representative value, which waited so many steps, is
        sent.

        A layer of zeros is not: there is nothing to send. One whose value is not finite is, so that
        it shows. Then: one that is always sent, one in the warm-up, one before there is a
        threshold, one that waited as long as is allowed, and one that reaches the threshold
        (equation 2), which sinks with the wait where it follows the bytes.
        """
        if value == 0:
            return False
        if not math.isfinite(value) or layer.always or self._steps < self._config.warmup:
            return True
        if self.threshold == NO_THRESHOLD or waited >= self._config.oldest:
            return True
        threshold = self.threshold
        if self._follows_bytes:
            threshold *= 1 - (waited / self._config.oldest) ** 2
        return value >= threshold

    def _representative(self, layer: Layer, moment: float) -> float:
        if self._config.representative == "l1" or moment == 0:
            return moment
        if self._config.representative == "l2":
            return math.sqrt(moment)
        return moment / layer.numel

    def end_step(self, overhead: int = 0) -> None:
        """End the step, in which all layers have been decided, and set the next one's threshold.

        overhead: bytes that were sent besides
        """
        excess = 0.0
        if self._follows_bytes and self._bytes:
            excess = (self._sent_bytes + overhead) / ((1 - self._config.ratio) * self._bytes) - 1
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
        """Find the threshold that lets (1 - R) of all elements through (Algorithm 1). Layers are
        taken from the smallest value up: by the paper's text, the small ones are dropped first."""
        values, sizes = zip(*self._found, strict=True) if self._found else ((), ())
        found = native.load().layerdrop_threshold(list(values), list(sizes), self._config.ratio)
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
        """Move the threshold up when more was sent than the budget, in this step (`excess`) and so
        far, else down; not far beyond the layers' values, from where it would take long to return.
        """
        found = [value for value, _ in self._found if 0 < value < math.inf]
        if found:
            moved = self.threshold * math.exp(_PROPORTIONAL * excess + _INTEGRAL * self._debt)
            self.threshold = min(max(moved, min(found) / 2), max(found) * 2)

    def cancel_step(self) -> None:
        """Forget all decisions since end_step()."""
        self._begin_step()

    def forget_waiting(self) -> None:
        """Forget between two steps which parameters wait: everything was sent by other means."""
        self._waited.clear()
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Return what load_state_dict() takes, between two steps."""
        return {
            "representative": self._config.representative,
            "steps": self._steps,
            "threshold": self.threshold,
            "debt": self._debt,
            "waited": dict(self._waited),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the rule that was saved.

        Raises ValueError for a state that lacks something, or whose threshold is of another
        representative; nothing has changed then.
        """
        if missing := {"representative", "steps", "debt", "waited", "threshold"} - set(state):
            raise ValueError(
                f"the state of layer dropping lacks {', '.join(sorted(missing))}: load what "
                "state_dict() returned"
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
