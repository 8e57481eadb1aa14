"""Pools of ranks that have an accelerator: by default the delayed test device, of type "late"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import SHORT_TIMEOUT, Pool, accelerator


@pytest.fixture(scope="module")
def delayed_pool(ranks: int) -> Iterator[Pool]:
    """Yield the pool of a file's tests."""
    shared = Pool(ranks, device=accelerator.DEVICE)
    yield shared
    assert not any(shared.close()), "a rank of the pool left with an error code"


@pytest.fixture
def own_delayed_pool(ranks: int) -> Iterator[Pool]:
    """Yield the pool of one test, which may harm the group; killed at the end."""
    own = Pool(ranks, device=accelerator.NAME)
    yield own
    own.kill()


@pytest.fixture
def short_timeout_delayed_pool(ranks: int) -> Iterator[Pool]:
    """Yield the pool of one test, with a short group timeout; killed at the end."""
    own = Pool(ranks, device=accelerator.NAME, timeout=SHORT_TIMEOUT)
    yield own
    own.kill()
