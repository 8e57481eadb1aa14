"""`make flakes`, and the seeds of random tests."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import seeds

ROOT = Path(__file__).resolve().parents[3]

ODD_SEEDS_FAIL = """
import os

def test_passes():
    pass

def test_fails_with_odd_seeds():
    print("something to read")
    assert int(os.environ["HBMCOMM_TEST_SEED"]) % 2 == 0
"""

DRAW = """
import random, torch

def test_draws():
    assert False, f"{random.random()} {torch.rand(())} drawn"
"""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests/python"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "-p no:randomly", **more}


def test_flakes_lists_failed_tests_with_seed_and_output(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(ODD_SEEDS_FAIL)
    program = (
        'add_test(program sh -c "echo output of the program; exit $((HBMCOMM_TEST_SEED % 2))")'
    )
    (tmp_path / "CTestTestfile.cmake").write_text(program)
    commands = environment(
        CTEST=shlex.join(["ctest", "--test-dir", str(tmp_path)]),
        PYTEST=shlex.join([sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider"]),
    )

    def flakes(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts/flakes.py"), *more],
            cwd=tmp_path, env=commands, text=True, capture_output=True,
        )  # fmt: skip

    both = flakes("--runs", "2", "--seed", "6")
    assert both.returncode == 1, both.stderr
    assert "run 1 of 2, seed 6: 3 passed, 0 failed" in both.stdout
    assert "run 2 of 2, seed 7: 1 passed, 2 failed" in both.stdout
    for test in ("program", "test_it.py::test_fails_with_odd_seeds"):
        assert f"=== {test}\n=== failed in 1 of 2 runs, with seed 7\n" in both.stdout
    assert "output of the program" in both.stdout
    assert "something to read" in both.stdout

    one = flakes("--tier", "native", "--runs", "1", "--seed", "6", "--tests", "prog", "--busy", "2")
    assert one.returncode == 0, one.stdout
    assert one.stdout.endswith("no test failed in 1 runs\n")
    none = flakes("--tier", "native", "--runs", "1", "--tests", "absent")
    assert none.returncode == 1
    assert "the run as a whole" in none.stdout


def test_a_failed_test_prints_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(DRAW)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    surroundings = environment(HBMCOMM_TEST_SEED="77")
    output = subprocess.run(
        command, cwd=tmp_path, env=surroundings, text=True, capture_output=True
    ).stdout
    assert "- seed -" in output
    assert output.count("HBMCOMM_TEST_SEED=77\n") == 2, "in the header and with the failure"
    monkeypatch.setenv(seeds.VARIABLE, "77")
    seeds.begin("test_it.py::test_draws")
    assert f"{random.random()} {torch.rand(())} drawn" in output


def test_tests_draw_different_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeds.VARIABLE, "5")
    drawn = []
    for name in ("one", "other", "one"):
        monkeypatch.setattr(seeds, "_test", name)
        monkeypatch.setattr(seeds, "_asked", iter(range(2)))
        drawn.append([seeds.fresh(), seeds.fresh()])
    assert drawn[0] == drawn[2]
    assert len({*drawn[0], *drawn[1]}) == 4
