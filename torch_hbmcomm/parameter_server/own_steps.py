"""Refuses an optimizer's own step() while a parameter server steps the optimizer, because other
workers would not get the changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_hbmcomm.optimizers import watch_steps


class OwnSteps:
    """Rejects optimizer.step() outside allowed() until release(), or until this object is
    garbage-collected."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._allowed = False
        optimizers = () if optimizer is None else (optimizer,)
        self.release = watch_steps(self, before=OwnSteps._check, optimizers=optimizers)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def _check(self, *_: Any) -> None:
        if not self._allowed:
            raise RuntimeError(
                "optimizer.step() under a parameter server changes this worker's model alone: call "
                "the server's step(), which steps the optimizer and shares the changes"
            )
