"""Fixtures: memory boxes in the test's process, for a parameter server's workers in its threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.ps_models import LEAST_SHARD_BYTES
from harness.ps_workers import Boxes, serving
from torch_hbmcomm.parameter_server import layout


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def boxes(transport: str) -> Iterator[Boxes]:
    with serving(transport) as served:
        yield served


@pytest.fixture
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a small model into many shards."""
    monkeypatch.setattr(layout, "SHARD_BYTES", LEAST_SHARD_BYTES)
