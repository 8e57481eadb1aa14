"""The exchange over RDMA, in a guest that has soft-RoCE; test_torch.py trains over it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from guest import boot, verbs

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]


def test_sums_are_exact_without_pytorch(tmp_path: Path) -> None:
    program = Path(__file__).with_name("parameter_server_exchange.py")
    assert "exact" in verbs.run([sys.executable, program], tmp_path)
