"""A process ends with the program's own exit code, whatever its groups and threads are doing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import beyond_gloo
from harness.cases import cases
from harness.endings import FRAMES, STATES, WAYS, Endings

pytestmark = beyond_gloo


@pytest.fixture(scope="module")
def endings() -> Iterator[Endings]:
    with Endings() as warm:
        yield warm


@pytest.mark.parametrize(
    ("frame", "state", "way"),
    cases(
        FRAMES,
        STATES,
        WAYS.keys(),
        quick={
            "one-callback-exit",
            "one-then-exit",
            "nodes-wait-exit",
            "nodes-sync-interrupt_twice",
            "nodes-dropped-in_cycle",
            "instead-sync-exit",
            "instead-wait-del",
        },
    ),
)
def test_exit_code(endings: Endings, frame: str, state: str, way: str) -> None:
    ending = endings.run(frame, state, way)
    assert ending.right(way), ending
