"""The contenders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from papers.layer_drop.plan import Plan

RATIO = 0.9  # for sections with one ratio; the paper does not state its ratio


@dataclass(frozen=True, eq=False)
class Contender:
    """A way of training.

    hook: name in hooks.py.
    terms: arguments of LayerDrop or LowRank, for the hooks "layer_drop" and "low_rank".
    """

    name: str
    hook: str = "none"
    terms: Mapping[str, Any] = field(default_factory=dict)
    gloo: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the ranks' prepare()."""
        return {"hook": self.hook, "terms": dict(self.terms), "gloo": self.gloo}

    @property
    def drops(self) -> bool:
        return float(self.terms.get("ratio", 0)) > 0

    @property
    def aim(self) -> float | None:
        """Return the intended share of all bytes to send, or None."""
        if "ratio" not in self.terms or self.terms.get("target") == "paper":
            return None
        return float(1 - self.terms["ratio"])


def dropping(ratio: float) -> Contender:
    """Return the contender that drops whole layers, and sends 1 - `ratio` of all bytes."""
    return Contender(f"R = {ratio:g}", "layer_drop", {"ratio": ratio, "target": "bytes"})


PLAIN = Contender("DDP")
NOTHING_DROPPED = dropping(0)
PAPERS_RULE = Contender(
    f"R = {RATIO:g}, the paper's rule", "layer_drop", {"ratio": RATIO, "target": "paper"}
)
LOW_RANK = Contender(f"R = {RATIO:g}, low rank", "low_rank", {"ratio": RATIO})
BFLOAT16 = Contender("bfloat16", "bf16")
POWER_SGD = Contender("PowerSGD", "PowerSGD")
GLOO = Contender("DDP over Gloo", gloo=True)


def of_ddp(plan: Plan) -> list[Contender]:
    """Return the contenders under DDP besides PLAIN and NOTHING_DROPPED."""
    return [*map(dropping, plan.ratios), PAPERS_RULE, LOW_RANK, BFLOAT16, POWER_SGD, GLOO]
