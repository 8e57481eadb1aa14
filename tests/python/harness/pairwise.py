"""Products of three parameters cut down to the cases in which every two values meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")


def in_turn(choices: Sequence[Choice], *numbers: int) -> Choice:
    """Return the third parameter of a case from the numbers of its first two, so that each value
    meets each of theirs. Needs at least as many of these as there are choices."""
    return choices[sum(numbers) % len(choices)]
