"""Which layers are sent: one deterministic rule.

Rules that are made of equal terms and asked the same in the same order give the same answers: under
DDP every rank has one and feeds it what all agreed on. A worker of a parameter server has one of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from torch_hbmcomm import native
from torch_hbmcomm.layer_drop.layers import Layer
from torch_hbmcomm.layer_drop.terms import LayerDrop

NO_THRESHOLD = -1.0

# The feedback on bytes, a PI controller of the threshold's logarithm. With ResNet-50's layers, even
# when gradients shrink by 2.3 % a step, the mean over 200 steps stays within a point of 1 - R
# (benchmarks/layer_drop_feedback.py). Without the integral it lags behind; larger gains send less
# evenly.
_PROPORTIONAL = 0.05
_INTEGRAL = 0.005
_MOST_DEBT = 10.0  # steps' budgets: where always-sent layers exceed the budget, nothing helps


class Rule:
    """A step is decide() for all layers, in one call or several, and end_step().

    threshold: that the next decision is made with; NO_THRESHOLD: everything is sent
    """

    def __init__(self, terms: LayerDrop) -> None:
        self._terms = terms
        fixed = terms.fixed_threshold
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
        if self._terms.ratio == 0:
            return self._terms.fixed_threshold is None
        return self._steps < self._terms.warmup and not self._searches

    @property
    def waited(self) -> dict[str, int]:
        """Steps since a parameter was sent, of those that wait."""
        return self._waited

    def decide(
        self, layers: Sequence[Layer], moments: Sequence[float], idle: Collection[str] = ()
    ) -> list[bool]:
        """Whether each is sent in this step.

        Args:
            moments: of the accumulated gradient, the sum of its absolute values (of squares for
                "l2"), a mean over those who decide alike
            idle: parameters that got nothing new in this step; they wait, and stay cached when the
                rest of their layer is sent

        A layer of zeros is not sent: there is nothing in it. One with a moment that is not finite
        is, so that it can be seen.
        """
        return [self._decide(*one, idle) for one in zip(layers, moments, strict=True)]

    def end_step(self, overhead: int = 0) -> None:
        """All layers have been decided. overhead: bytes that were sent besides."""
        excess = 0.0
        if self._follows_bytes and self._bytes:
            excess = (self._sent_bytes + overhead) / ((1 - self._terms.ratio) * self._bytes) - 1
            self._debt = min(max(self._debt + excess, -_MOST_DEBT), _MOST_DEBT)
        if self._searches:
            self._search()
        elif self._follows_bytes:
            self._follow(excess)
        self._waited = self._next
        self._steps += 1
        self._begin_step()

    def cancel_step(self) -> None:
        """As if what was decided since end_step() had not been asked."""
        self._begin_step()

    def forget_waiting(self) -> None:
        """Between two steps: everything was sent by other means."""
        self._waited.clear()
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Between two steps."""
        return {
            "representative": self._terms.representative,
            "steps": self._steps,
            "threshold": self.threshold,
            "debt": self._debt,
            "waited": dict(self._waited),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the threshold is one of another kind."""
        if state["representative"] != self._terms.representative:
            raise ValueError(
                f'the checkpoint is of representative="{state["representative"]}", whose threshold '
                f'means nothing to "{self._terms.representative}": use the same one'
            )
        self._steps = int(state["steps"])
        self._debt = float(state["debt"])
        self._waited = {name: int(steps) for name, steps in state["waited"].items()}
        if self._terms.fixed_threshold is None:
            self.threshold = float(state["threshold"])
        self._begin_step()

    @property
    def _searches(self) -> bool:
        if self._terms.fixed_threshold is not None or self._terms.ratio == 0:
            return False
        since = self._steps - max(self._terms.warmup, 1) + 1
        return since >= 0 and since % self._terms.every == 0

    @property
    def _follows_bytes(self) -> bool:
        terms = self._terms
        return (
            terms.target == "bytes"
            and terms.fixed_threshold is None
            and self.threshold > NO_THRESHOLD
        )

    def _decide(self, layer: Layer, moment: float, idle: Collection[str]) -> bool:
        awake = [name for name in layer.parameters if name not in idle]
        waited = max((self._waited.get(name, 0) for name in awake), default=0)
        value = self._representative(layer, moment)
        if awake:
            self._found.append((value, layer.numel))
        sent = bool(awake) and self._reaches(layer, value, waited)
        for name in layer.parameters:
            if moment == 0 or (sent and name not in idle):
                self._next.pop(name, None)
            else:
                self._next[name] = self._waited.get(name, 0) + 1
        self._bytes += layer.nbytes
        self._sent_bytes += layer.nbytes if sent else 0
        return sent

    def _reaches(self, layer: Layer, value: float, waited: int) -> bool:
        if value == 0:
            return False
        if not math.isfinite(value) or layer.always or self._steps < self._terms.warmup:
            return True
        if self.threshold == NO_THRESHOLD or waited >= self._terms.oldest:
            return True
        threshold = self.threshold
        if self._follows_bytes:
            threshold *= 1 - (waited / self._terms.oldest) ** 2
        return value >= threshold

    def _representative(self, layer: Layer, moment: float) -> float:
        if self._terms.representative == "l1" or moment == 0:
            return moment
        if self._terms.representative == "l2":
            return math.sqrt(moment)
        return moment / layer.numel

    def _follow(self, excess: float) -> None:
        """Up when more was sent than the budget, in this step (`excess`) and so far; not far beyond
        the layers' values, where it would do nothing and take long to come back."""
        found = [value for value, _ in self._found if 0 < value < math.inf]
        if found:
            moved = self.threshold * math.exp(_PROPORTIONAL * excess + _INTEGRAL * self._debt)
            self.threshold = min(max(moved, min(found) / 2), max(found) * 2)

    def _search(self) -> None:
        """Algorithm 1, from the smallest layer up: the paper's text defines the threshold as the
        value that lets (1 - R) of all gradients through, for which the small ones are dropped
        first."""
        values, sizes = zip(*self._found, strict=True) if self._found else ((), ())
        found = native.load().layerdrop_threshold(list(values), list(sizes), self._terms.ratio)
        if found != NO_THRESHOLD and math.isfinite(found):
            self.threshold = found
