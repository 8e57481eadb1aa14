"""What to measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_hbmcomm.bench import machine
from torch_hbmcomm.bench.sizes import KIB, MIB

_SIZES = [64 * KIB * 4**power for power in range(7)]  # to 256 MiB


@dataclass(frozen=True)
class Plan:
    """Raises ValueError for what cannot be measured.

    largest: bytes of the largest read, write or accumulate.
    rounds: the median is of these.
    lanes: connections of tcp.
    threads: with which the box accumulates, and the triad adds.
    clients: how many work at a time, each for `window` seconds a round.
    megabits: rate of the slow link, each way, in Mbit/s.
    store: a directory on the disk that stores are measured on; None: they are not.
    """

    sections: Sequence[str]
    largest: int = 256 * MIB
    rounds: int = 11
    lanes: int = 4
    threads: int = machine.cores()
    clients: Sequence[int] = (2, 4, 8, 16, 32)
    window: float = 1.0
    megabits: int = 1000
    store: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("lanes", 1), ("threads", 1), ("megabits", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least {least}")
        if self.largest < _SIZES[0]:
            raise ValueError(f"the largest size is {self.largest} bytes; at least {_SIZES[0]}")
        if not self.clients or min(self.clients) < 1:
            raise ValueError("at least one client works at a time")

    def sizes(self, least: int, most: int = _SIZES[-1]) -> list[int]:
        """From `least` on by fours; the largest alone if that is smaller."""
        return [size for size in _SIZES if least <= size <= min(most, self.largest)] or [
            self.largest
        ]


QUICK: dict[str, Any] = {"largest": MIB, "rounds": 2, "clients": (2, 4), "window": 0.1}
"""Fields of a plan that shows no more than that everything can be measured."""
