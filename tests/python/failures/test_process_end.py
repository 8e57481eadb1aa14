"""A process ends with the program's own exit code, whatever its groups and threads are doing.

Each state of a group is tested with each way to leave, in one of three frames: one node, two nodes,
hbm instead of Gloo. Most tests are in the full tier. `python -m harness.endings` runs all
combinations.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import beyond_gloo
from harness.endings import Endings, pairwise_cover

pytestmark = beyond_gloo

QUICK = {
    ("one", "callback", "interrupt_twice"),
    ("one", "called", "exit"),
    ("one", "wait", "del"),
    ("nodes", "destroying", "exit"),
    ("nodes", "sync", "interrupt_twice"),
    ("nodes", "dropped", "in_cycle"),
    ("nodes", "meeting", "exit"),
    ("instead", "sync", "exit"),
    ("instead", "many", "return"),
}
FULL = [case for case in pairwise_cover() if case not in QUICK]


@pytest.fixture(scope="module")
def endings() -> Iterator[Endings]:
    with Endings() as warm:
        yield warm


@pytest.mark.parametrize(
    ("frame", "state", "way"),
    [
        *sorted(QUICK),
        *(pytest.param(*case, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_exit_code(endings: Endings, frame: str, state: str, way: str) -> None:
    ending = endings.run(frame, state, way)
    assert ending.right(way), ending
