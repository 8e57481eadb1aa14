"""What sections find whose workers train with PyTorch, and how it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

SHM = "ParameterServer shm"
TCP = "ParameterServer tcp"
DDP = "DDP"


@dataclass(frozen=True)
class Training:
    """case: what the contender trained under. samples: in the section's unit."""

    section: str
    contender: str
    case: str
    samples: list[float]


def table_of(title: str, headings: Sequence[str]) -> Table:
    """Numbers beside names, which are in the first column."""
    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    return table
