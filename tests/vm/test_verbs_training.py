"""The asynchronous parameter server over RDMA, in a guest that has soft-RoCE."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.guest import boot, verbs

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]

HERE = Path(__file__).parent


def run(folder: Path, program: str) -> str:
    return verbs.run([sys.executable, HERE / program], folder)


def test_sums_are_exact_without_pytorch(tmp_path: Path) -> None:
    assert "exact" in run(tmp_path, "parameter_server_exchange.py")


def test_two_workers_train(tmp_path: Path) -> None:
    output = run(tmp_path, "parameter_server_training.py")
    assert sorted(output.splitlines()) == [f"worker {i} agrees over verbs" for i in range(2)]
