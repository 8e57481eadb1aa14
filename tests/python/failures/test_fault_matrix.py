"""The fault matrix: each fault at each moment, on one node and on two, in each mode.

The table is in harness/faults/matrix.py. The full tier has every pair of values of two axes; the
long tier has all cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.faults import matrix, page
from harness.faults.job import FaultJob
from harness.faults.judge import assert_as_expected
from harness.faults.matrix import Cell, Verdict

QUICK = {
    "killed-before-one_node-collectives",
    "raises-during-two_nodes-hook",
    "stores_host_killed-after-one_node-asynchronous",
    "box_killed-during-one_node-asynchronous",
    "link_cut-destroy-two_nodes-collectives",
}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "failures.md"


COVERING = set(matrix.covering())


def marks(cell: Cell) -> Iterator[pytest.MarkDecorator]:
    if cell.name not in QUICK:
        yield pytest.mark.full if cell in COVERING else pytest.mark.long


CASES = [pytest.param(cell, id=cell.name, marks=list(marks(cell))) for cell in matrix.possible()]


@beyond_gloo
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("cell", CASES)
def test_cell(cell: Cell, tmp_path: Path) -> None:
    assert_as_expected(cell, FaultJob(cell, tmp_path).run())


def test_every_pair_is_covered() -> None:
    """Cells of the quick and the full tier have every pair; the long tier has the other cells."""
    cells = matrix.possible()
    run = [cell for cell in cells if all(mark.name != "long" for mark in marks(cell))]
    covered = {pair for cell in run for pair in matrix.pairs(cell)}
    assert covered == {pair for cell in cells for pair in matrix.pairs(cell)}


def test_few_cells_are_impossible() -> None:
    impossible = [cell for cell in matrix.CELLS if matrix.verdict(cell) is Verdict.IMPOSSIBLE]
    assert len(impossible) <= len(matrix.CELLS) / 4
    assert all(len(matrix.rule(cell).reason.split()) <= 5 for cell in impossible)


def test_every_rule_is_of_use() -> None:
    assert {cell.name for cell in matrix.possible()} >= QUICK
    for rule in matrix.RULES:
        assert any(matrix.rule(cell) is rule for cell in matrix.CELLS), rule


def test_the_page_shows_the_table() -> None:
    """To draw the page again: .venv/bin/python -m harness.faults.page, in tests/python."""
    assert page.drawn_into(PAGE.read_text()) == PAGE.read_text()
