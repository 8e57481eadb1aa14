"""Products of three parameters cut down to the cases in which every two values meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")


def in_turn(choices: Sequence[Choice], *numbers: int) -> Choice:
    """A test's third parameter, by the numbers of its first two: as one of those goes on, this goes
    through all choices. Meets every value of both if these are at least as many."""
    return choices[sum(numbers) % len(choices)]
