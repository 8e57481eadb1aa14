"""Messages between the ranks of a pool, by files instead of the tested group."""

from __future__ import annotations

import time
from pathlib import Path

from harness.context import Context


def tell(context: Context, event: str) -> None:
    """Publish that this rank has reached `event`, at most once in a call of the pool's run()."""
    _file(context, event, context.rank).touch()


def await_rank(context: Context, event: str, rank: int, limit: float = 60) -> None:
    """Wait until `rank` has published the event. Raises AssertionError after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not _file(context, event, rank).exists():
        assert time.monotonic() < deadline, f"rank {rank} has not {event}"
        time.sleep(0.001)


def _file(context: Context, event: str, rank: int) -> Path:
    return context.folder / f"{context.seed}-{event}-{rank}"
