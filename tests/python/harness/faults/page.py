"""Draws the fault matrix into docs/failures.md, between two marks.

As a program, in tests/python: python -m harness.faults.page
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.faults.matrix import (
    CELLS,
    FAULTS,
    MEANINGS,
    MODES,
    MOMENTS,
    RULES,
    Cell,
    Fault,
    Mode,
    Moment,
    Place,
    Verdict,
    covering,
    rule,
    verdict,
)

BEGIN = "<!-- Drawn from tests/python/harness/faults/matrix.py. -->"
END = "<!-- The end of what is drawn. -->"


def drawn_into(page: str) -> str:
    """Return the page, with its section replaced by section()."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section()}\n{END}{after}"


def section() -> str:
    """Return the section, below its heading."""
    parts = [
        _table(("fault", "is"), [(fault.value, text) for fault, text in FAULTS.items()]),
        _table(("moment", "is"), [(moment.value, text) for moment, text in MOMENTS.items()]),
        _table(("mode", "is"), [(mode.value, text) for mode, text in MODES.items()]),
        _table(("verdict", "means"), [(one.value, text) for one, text in MEANINGS.items()]),
        "Cells have their verdicts from these rules, the first that applies:",
        _table(("verdict", "because", "cells"), _rules()),
        _count(),
    ]
    for modes, rows in _grids():
        names = " and ".join(mode.value for mode in modes)
        parts.append(
            f"**{names.capitalize()}**. If a cell has two verdicts, the first is for one node "
            "and the second for two nodes:"
        )
        parts.append(_table(("", *(moment.value for moment in Moment)), rows))
    return "\n\n".join(parts) + "\n"


def _rules() -> list[tuple[str, ...]]:
    """Return the rules in order, with the number of cells of each.

    Rules with the same verdict and reason are one row.
    """
    counts = dict.fromkeys(((one.verdict.value, one.reason) for one in RULES), 0)
    for cell in CELLS:
        counts[verdict(cell).value, rule(cell).reason] += 1
    return [(*words, str(count)) for words, count in counts.items()]


def _count() -> str:
    impossible = sum(verdict(cell) is Verdict.IMPOSSIBLE for cell in CELLS)
    return (
        f"{impossible} of {len(CELLS)} cells are impossible. {len(covering())} cells contain every "
        "possible pair of values\nof two axes: the quick and the full tier run these cells, and "
        "`make test-long` runs the others."
    )


def _grids() -> list[tuple[list[Mode], list[tuple[str, ...]]]]:
    """Return the tables, each with its modes. Modes with equal tables share one table."""
    grids: list[tuple[list[Mode], list[tuple[str, ...]]]] = []
    for mode in Mode:
        rows = [
            (fault.value, *(_cell(fault, moment, mode) for moment in Moment)) for fault in Fault
        ]
        for modes, known in grids:
            if known == rows:
                modes.append(mode)
                break
        else:
            grids.append(([mode], rows))
    return grids


def _cell(fault: Fault, moment: Moment, mode: Mode) -> str:
    found = [verdict(Cell(fault, moment, place, mode)).value for place in Place]
    return found[0] if len(set(found)) == 1 else " / ".join(found)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    page = Path(__file__).resolve().parents[4] / "docs" / "failures.md"
    page.write_text(drawn_into(page.read_text()))
