"""Fixtures: pools of ranks with an accelerator, by default the delayed test device "late"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import SHORT_TIMEOUT, Pool, accelerator


@pytest.fixture(scope="module")
def delayed_pool(ranks: int) -> Iterator[Pool]:
    """Yield one pool for all tests of a file."""
    shared = Pool(ranks, device=accelerator.DEVICE)
    yield shared
    assert not any(shared.close()), "a rank of the pool left with an error code"


@pytest.fixture
def own_delayed_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool for one test, which may harm the group. Kill the pool at the end."""
    own = Pool(ranks, device=accelerator.NAME)
    yield own
    own.kill()


@pytest.fixture
def short_timeout_delayed_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool with a short group timeout for one test. Kill the pool at the end."""
    own = Pool(ranks, device=accelerator.NAME, timeout=SHORT_TIMEOUT)
    yield own
    own.kill()
