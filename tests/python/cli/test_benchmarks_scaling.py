"""benchmarks.scaling: the model, the measurements and the output."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.scaling.__main__ import app
from benchmarks.scaling.growths import growths
from benchmarks.scaling.model import Growth, StoreCosts, fit, gathering, iteration
from benchmarks.scaling.tables import boxes
from torch_hbmcomm.bench.result import sampled

ROOT = Path(__file__).resolve().parents[3]


def test_a_fit_finds_the_growth_that_made_the_times() -> None:
    for _ in range(20):
        made = Growth(*(random.choice([0.0, random.uniform(0.1, 10)]) for _ in range(3)))
        if made == Growth(0, 0, 0):
            continue
        found = fit({ranks: made.here(ranks) for ranks in (2, 4, 8, 16, 32)})
        for ranks in (1, 3, 64, 1000):
            assert found.here(ranks) == pytest.approx(made.here(ranks), rel=1e-6)


def test_a_fit_has_no_negative_coefficient() -> None:
    found = fit({2: 3.0, 4: 2.0, 8: 1.0})
    assert min(found.a, found.b, found.c) >= 0


def test_ranks_with_own_cores_work_in_parallel() -> None:
    growth = Growth(1, 2, 3)
    assert growth.with_a_core_each(10, cores=2) == 1 + 2 * 2 + 2 * 3 * 10


def test_one_rank_asks_the_store_three_times() -> None:
    costs = StoreCosts(question=1.0, seen=0.25, read=0.5)
    assert gathering(1, costs) == pytest.approx(3 + 0.25 + 0.5 + 0, abs=1e-3)


def test_the_store_answers_requests_one_by_one() -> None:
    """Gathering takes the time of the necessary requests, and a bounded time for waiting ranks."""
    costs = StoreCosts(question=1e-5, seen=1e-7, read=1e-6)
    for ranks in (2, 30, 200):
        least = ranks * (3 * costs.question + ranks * (costs.seen + costs.read))
        assert least <= gathering(ranks, costs) <= 3 * least + 0.1
    assert gathering(50, costs, spread=2.0) >= 2.0 * 49 / 50


def test_workers_wait_only_for_busy_boxes() -> None:
    assert iteration(10, service=0.01, computation=1.0) == pytest.approx(1.0)
    assert iteration(10, service=0.5, computation=1.0) == pytest.approx(5.0)


def test_the_check_uses_the_unfitted_number() -> None:
    found = [
        sampled({"quantity": "start", "ranks": ranks}, "hbm", [1e3 * seconds], unit="ms")
        for ranks, seconds in {2: 2.0, 4: 4.0, 8: 8.0, 16: 32.0}.items()
    ]
    [(quantity, contender, row, growth, check)] = growths(found)
    assert (quantity, contender, row[16]) == ("start", "hbm", 32.0)
    assert growth.here(16) == pytest.approx(16)
    assert check == pytest.approx(0.5)


@pytest.mark.full
def test_it_measures_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    asked = ["--ranks=1,2,3,4", "--most-nodes=2", "--rounds=1", f"--json={file}"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["measurements"]
    found = {(row["quantity"], row["contender"], row["ranks"]) for row in rows}
    assert len(rows) == len(found) == 4 * 10 + 2 * 3
    assert "model / measured" in done.output


def test_the_page_has_the_simulated_boxes() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    _, heading, rows = boxes()
    for row in (heading, *rows):
        assert f"| {' | '.join(row)} |" in page


def test_a_group_beyond_its_staging_memory_is_refused() -> None:
    """docs/scaling.md states the largest possible number of ranks, 32,264."""
    program = """
import torch.distributed as dist
dist.init_process_group("hbm", store=dist.HashStore(), rank=0, world_size=32_265)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    needed = 2 * ((1 << 29) + (1 << 28))  # two pairs of buffers; each size is a power of two
    assert done.returncode != 0
    assert f"a group of 32265 ranks needs at least {needed}" in done.stderr


def test_it_refuses_too_few_numbers() -> None:
    done = CliRunner().invoke(app, ["--ranks=2,4"])
    assert done.exit_code == 2
