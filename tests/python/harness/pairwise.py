"""Few cases of three parameters that have every pair of values of any two parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")


def in_turn(choices: Sequence[Choice], *numbers: int) -> Choice:
    """Return the value of a case's third parameter.

    numbers: indices of the values of the first two parameters. If each of the two has at least as
    many values as `choices`, each choice occurs with each value of either parameter.
    """
    return choices[sum(numbers) % len(choices)]
