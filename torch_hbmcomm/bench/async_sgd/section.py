"""A part of the run: what is measured side by side, and what the box shall reach there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType

from torch_hbmcomm.bench.async_sgd.plan import Plan
from torch_hbmcomm.bench.async_sgd.result import Measurement, Row
from torch_hbmcomm.bench.async_sgd.training import Training
from torch_hbmcomm.bench.report import Verdict


@dataclass
class Findings:
    """Filled while sections are measured.

    progress: told what comes next.
    unavailable: contenders, sections and single cells that were not measured, and why.
    notes: what else the reader should know.
    """

    progress: Callable[[str], None] = lambda what: None
    measurements: list[Measurement] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, measurements: Iterable[Measurement]) -> None:
        self.measurements += measurements


Goal = Callable[[Sequence[Row]], Verdict | None]
"""Looks at all rows of a scenario; None if nobody whom it is about took part."""


@dataclass(frozen=True)
class Section:
    """
    about: what it compares, in a line.
    measure: raises Unavailable, or PeerFailed when a box or a worker of ours fails.
    goals: by scenario, whose tables come in this order.
    render, verdicts: of a section that finds trainings: its table, and where these stand.
    """

    name: str
    about: str
    measure: Callable[[Plan, Findings], None]
    goals: dict[str, Sequence[Goal]] = field(default_factory=dict)
    render: Callable[[Sequence[Training]], Iterator[RenderableType]] = lambda found: iter(())
    verdicts: Callable[[Sequence[Training]], Iterator[Verdict]] = lambda found: iter(())
