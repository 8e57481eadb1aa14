"""A process ends with the program's own exit code, whatever its groups and threads are doing.

The table is harness/endings.py. The quick and the full tier have every pair of a frame, a state and
a way, the long one all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from harness import beyond_gloo
from harness.cases import cases
from harness.endings import FRAMES, STATES, WAYS, Endings
from harness.pairwise import in_turn

pytestmark = beyond_gloo

QUICK = {
    "one-callback-exit",
    "one-then-exit",
    "nodes-wait-exit",
    "nodes-sync-interrupt_twice",
    "nodes-dropped-in_cycle",
    "instead-sync-exit",
    "instead-wait-del",
}
COVERING = {
    f"{in_turn(FRAMES, row, column)}-{state}-{way}"
    for row, state in enumerate(STATES)
    for column, way in enumerate(WAYS)
}
LONG = set(map("-".join, product(FRAMES, STATES, WAYS))) - COVERING - QUICK


@pytest.fixture(scope="module")
def endings() -> Iterator[Endings]:
    with Endings() as warm:
        yield warm


@pytest.mark.parametrize(
    ("frame", "state", "way"),
    cases(FRAMES, STATES, WAYS.keys(), quick=QUICK, long=LONG),
)
def test_exit_code(endings: Endings, frame: str, state: str, way: str) -> None:
    ending = endings.run(frame, state, way)
    assert ending.right(way), ending
