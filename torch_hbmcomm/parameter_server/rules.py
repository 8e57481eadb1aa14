"""Update rules: the delta that a worker sends, and how it applies fresh weights.

To add a rule, derive a class from `Rule`, and name it in _NAMES.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

_BETA = 0.9  # of elastic averaging (Zhang et al. 2015, section 5)


class Rule(ABC):
    """Computes deltas and applies fresh weights, on parts of the model.

    The methods take one-dimensional tensors of equal length. `local` is a part of the worker's
    model, and `base` the weights that the worker took last. `fresh` has the weights as read from
    the box; a rule must not change it. `sent` is the delta buffer: the box adds scale() times
    `sent` to the weights. The dtype of `sent` may be narrower; then `sent` is the rounded delta.

    repr() names a rule in error messages, and workers of a job compare their rules by repr().
    """

    reads_first: ClassVar[bool]
    """True: fresh weights are read before the delta is computed. False: after the delta was added
    to the weights."""

    momentum: float = 0.0
    """The Nesterov momentum of a worker's deltas of parameters, 0 to less than 1. In an exchange a
    delta d is sent as d + momentum * m, where m = momentum * (the last m) + d is the worker's own.
    The last changes of a worker, which it sends when it leaves, have no momentum."""

    @abstractmethod
    def scale(self, kind: str, workers: int) -> float:
        """Return the factor with which the box multiplies deltas.

        kind: "parameter" or "buffer" (a running statistic). workers: the number of live workers.
        """

    @abstractmethod
    def difference(
        self, local: Tensor, base: Tensor, fresh: Tensor, out: Tensor, workers: int
    ) -> None:
        """Compute the delta into `out`; change nothing else."""

    @abstractmethod
    def take(self, local: Tensor, base: Tensor, fresh: Tensor, sent: Tensor) -> None:
        """Set `local` and `base` at the end of an exchange. `fresh` includes `sent`, unless
        reads_first."""

    def take_unsent(self, local: Tensor, base: Tensor, fresh: Tensor) -> None:
        """Apply fresh weights to a dropped layer that other workers changed.

        The delta, local - base, continues to wait. Reads `fresh` only once, because `fresh` may
        change during the call. REQUIRES: not reads_first.
        """
        local.sub_(base)
        base.copy_(fresh)
        local.add_(base)

    @abstractmethod
    def take_ahead(
        self, local: Tensor, base: Tensor, fresh: Tensor, sent: Tensor, scale: float
    ) -> None:
        """Set `local` and `base` while scale * sent is in flight, and not in `fresh` yet."""


class Downpour(Rule):
    """Move the weights by the local optimizer's updates.

    Downpour SGD (Dean et al. 2012, *Large scale distributed deep networks*).

    scale: "mean" divides a delta by the number of live workers, so that a learning rate means the
    same as under DDP. "sum" adds the delta undivided, and a number is the factor itself. The deltas
    of buffers are always divided by the number of live workers.
    """

    reads_first = False

    def __init__(self, scale: Literal["mean", "sum"] | float = "mean") -> None:
        if isinstance(scale, str) and scale not in ("mean", "sum"):
            raise ValueError(f'scale is "mean", "sum" or a number, not {scale!r}')
        self._scale = scale

    def __repr__(self) -> str:
        return f"Downpour(scale={self._scale!r})"

    def scale(self, kind: str, workers: int) -> float:
        if kind == "buffer" or self._scale == "mean":
            return 1 / workers
        return 1.0 if self._scale == "sum" else float(self._scale)

    def difference(
        self, local: Tensor, base: Tensor, fresh: Tensor, out: Tensor, workers: int
    ) -> None:
        torch.sub(local, base, out=out)

    def take(self, local: Tensor, base: Tensor, fresh: Tensor, sent: Tensor) -> None:
        local.copy_(fresh)
        base.copy_(local)

    def take_ahead(
        self, local: Tensor, base: Tensor, fresh: Tensor, sent: Tensor, scale: float
    ) -> None:
        torch.add(fresh, sent, alpha=scale, out=local)
        base.copy_(local)


class Elastic(Rule):
    """Pull each worker's model and the weights towards each other; in between, workers train alone.

    Elastic averaging (Zhang et al. 2015, *Deep learning with elastic averaging SGD*, equations 5
    and 6); the weights are the center: e = alpha * (local - center), local -= e, center += e.

    Args:
        alpha: the factor, more than 0 and at most 1; None: 0.9 / (live workers), where 0.9 is the
            paper's beta
    """

    reads_first = True

    def __init__(self, alpha: float | None = None) -> None:
        if alpha is not None and not 0 < alpha <= 1:
            raise ValueError(f"alpha is more than 0 and at most 1, not {alpha}")
        self._alpha = alpha

    def __repr__(self) -> str:
        return f"Elastic(alpha={self._alpha!r})"

    def scale(self, kind: str, workers: int) -> float:
        return 1.0

    def difference(
        self, local: Tensor, base: Tensor, fresh: Tensor, out: Tensor, workers: int
    ) -> None:
        alpha = _BETA / workers if self._alpha is None else self._alpha
        torch.sub(local, fresh, out=out).mul_(alpha)

    def take(self, local: Tensor, base: Tensor, fresh: Tensor, sent: Tensor) -> None:
        local.sub_(sent)

    def take_ahead(
        self, local: Tensor, base: Tensor, fresh: Tensor, sent: Tensor, scale: float
    ) -> None:
        local.sub_(sent)


_NAMES: dict[str, type[Rule]] = {"downpour": Downpour, "easgd": Elastic}


def named(rule: str | Rule) -> Rule:
    """Return the rule of that name, or the rule itself. Raises ValueError for an unknown name."""
    if isinstance(rule, Rule):
        return rule
    if rule not in _NAMES:
        raise ValueError(f"rule {rule!r} is none of {', '.join(_NAMES)}, nor a Rule")
    return _NAMES[rule]()
