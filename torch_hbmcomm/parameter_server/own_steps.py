"""Refuses an optimizer's step() beside the parameter server that steps it: nobody would be sent
what it changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class OwnSteps:
    """Lets an optimizer step inside of allowed() only, until release() or the end of this object: a
    server that was given up after an error is in nobody's way."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._allowed = False
        own = weakref.ref(self)

        def check(*_: Any) -> None:
            if (found := own()) is not None:
                found._check()

        self._handle = None if optimizer is None else optimizer.register_step_pre_hook(check)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def release(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _check(self) -> None:
        if not self._allowed:
            raise RuntimeError(
                "optimizer.step() beside a ParameterServer changes this worker's model alone: call "
                "the server's step(), which steps the optimizer and shares what it changes"
            )
