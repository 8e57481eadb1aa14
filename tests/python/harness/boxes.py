"""Fixtures: a memory box in the test's process, and clients of it over each transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.box_process import TOKEN
from torch_hbmcomm import smb


@pytest.fixture(scope="module")
def server() -> Iterator[smb.Server]:
    with smb.Server(memory="256MiB", token=TOKEN) as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def box(server: smb.Server, request: pytest.FixtureRequest) -> Iterator[smb.Box]:
    with smb.connect(server.url, TOKEN, transport=request.param) as connected:
        assert connected.transport == request.param
        yield connected


@pytest.fixture
def connect(server: smb.Server) -> Iterator[Callable[..., smb.Box]]:
    made: list[smb.Box] = []

    def one(**options: Any) -> smb.Box:
        made.append(smb.connect(server.url, TOKEN, **options))
        return made[-1]

    yield one
    for box in made:
        box.close()
