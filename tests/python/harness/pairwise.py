"""Few combinations of three parameters, in which every two values occur together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")


def in_turn(choices: Sequence[Choice], *numbers: int) -> Choice:
    """Return the value of a case's third parameter.

    numbers: indices of the values of the first two parameters. If these have at least as many
    values as `choices`, each choice occurs with each of their values.
    """
    return choices[sum(numbers) % len(choices)]
