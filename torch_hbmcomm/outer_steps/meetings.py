"""The interface of meetings, which OuterSteps has over a process group or over boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch_hbmcomm.outer_steps.config import OuterConfig

_COUNTS = ("steps", "meetings", "refused", "sent_bytes")


class Meetings(ABC):
    """A worker's part in the meetings. OuterSteps explains the methods of the same names.

    steps, meetings, refused, sent_bytes: the counters of OuterSteps.stats()

    Threads: one.
    """

    def __init__(self, config: OuterConfig) -> None:
        self._config = config
        self.steps = self.meetings = self.refused = self.sent_bytes = 0

    def step(self) -> None:
        self.steps += 1
        self.advance()
        interval = self._config.interval
        if interval is not None and self.steps % interval == 0:
            self.meet()

    @abstractmethod
    def advance(self) -> None:
        """Move the transfer that has begun one step further, and apply it if it is due."""

    @abstractmethod
    def meet(self) -> None: ...

    @abstractmethod
    def close(self, wait: bool) -> None: ...

    @abstractmethod
    def lend(self) -> AbstractContextManager[None]:
        """Put the outer weights into the model, and the inner weights back at the end."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None: ...

    def stats(self) -> dict[str, int]:
        return self.counts()

    def counts(self) -> dict[str, int]:
        """Return the counters."""
        return {name: getattr(self, name) for name in _COUNTS}

    def set_counts(self, state: Mapping[str, Any]) -> None:
        """Set the counters to the counters of a state."""
        for name in _COUNTS:
            setattr(self, name, int(state[name]))
