"""A part of the run: what is measured side by side, and what the box shall reach there."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import Measurement


@dataclass
class Findings:
    """Filled while sections are measured.

    unavailable: contenders and sections that were not measured, and why.
    notes: what else the reader should know.
    """

    measurements: list[Measurement] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, measurements: Iterable[Measurement]) -> None:
        self.measurements += measurements


@dataclass(frozen=True)
class Goal:
    """What `subject` shall reach; exactly one of the last four is given.

    bounds: the contenders that it is compared with; the fastest of those that took part counts.
    operation: those whose name begins so.
    share: of the bound's speed, at least. times: the bound's time, at most.
    microseconds: at most, with no bound. fair: of an equal share, what each client has at least.
    """

    subject: str
    bounds: Sequence[str] = ()
    operation: str = ""
    share: float | None = None
    times: float | None = None
    microseconds: float | None = None
    fair: float | None = None


@dataclass(frozen=True)
class Section:
    """
    about: what it compares, in a line.
    measure: raises Unavailable, or PeerFailed when the box or a client fails.
    streams: how many times its bytes an operation moves through memory; 0: shown as a time.
    """

    name: str
    about: str
    measure: Callable[[Plan, Findings], None]
    goals: Sequence[Goal] = ()
    streams: int = 1
