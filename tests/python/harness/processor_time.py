"""A pytest plugin that shows waiting tests: the wall time and processor time of each test and its
processes.

    PYTHONPATH=tests/python .venv/bin/python -m pytest -p harness.processor_time --times times.tsv

writes a line for each test: wall time, processor time and their difference in seconds, and the
test's name. Without pytest-xdist, on a quiet machine, a large difference shows that the test
waited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from harness.families import family

_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, required=True, help="file for each test's times")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    wall, processor = time.monotonic(), used(os.getpid())
    try:
        return (yield)
    finally:
        wall, processor = time.monotonic() - wall, used(os.getpid()) - processor
        with Path(item.config.getoption("--times")).open("a") as file:
            file.write(f"{wall:.2f}\t{processor:.2f}\t{wall - processor:.2f}\t{item.nodeid}\n")


def used(root: int) -> float:
    """Return the processor time of process `root` and its descendants, ended ones included."""
    ticks = (sum(map(int, fields[11:15])) for fields in family(root).values())
    return sum(ticks) / _TICKS
