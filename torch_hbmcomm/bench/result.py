"""The result of a run, section by section, and its JSON form.

    {"benchmark": name,
     "machine": {"cpu", "cores", "python", "torch", "torch_hbmcomm", "time"},
     "plan": {"ranks", "rounds", ...}, "sections": {name: what it compares},
     "contenders": {name: what it is}, "references": [name, ...], "unavailable": {who: why},
     "notes": [text, ...],
     "measurements": [
         {..., "contender", "calls_per_sample",
          "samples_us", "median_us", "minimum_us", "mean_us", "p99_us",
          "alone_samples_us", "alone_median_us", "alone_minimum_us", "alone_mean_us",
          "values": {name: number}, "curves": {name: [number, ...]}}, ...]}

A measurement begins with what was measured, as "collective", "dtype" and "bytes". A sample is a
single call (rounds.py says when it is several), on the slowest rank where there are several; its
unit is in the field's name. "p99_us" is there where there are samples enough. "alone_..." is of
rounds without the other contenders. "values" and "curves" are what else was found; their names end
in the unit. References do not do the whole job, and show what that would cost. Who is unavailable
is a contender, one in some cell ("mpich, bfloat16") or a section. "torch_hbmcomm" is null in a tree
that is not installed, and "torch" where there is none.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.text import Text

from torch_hbmcomm import machine
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.rounds import Samples
from torch_hbmcomm.version import __version__

_WORSE = 1.1  # times as long beside the others as alone: more than noise
_ENOUGH = 200  # samples for a 99th percentile
_DIGITS = 3


@dataclass(frozen=True)
class Measurement:
    """The samples of one contender in one row.

    of: the names of the row and their values.
    samples, alone: in `unit`.
    """

    of: Mapping[str, Any]
    contender: str
    samples: Sequence[float] = ()
    unit: str = "us"
    alone: Sequence[float] = ()
    calls_per_sample: int = 1
    values: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def minimum(self) -> float:
        return min(self.samples)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def p99(self) -> float | None:
        if len(self.samples) < _ENOUGH:
            return None
        return statistics.quantiles(self.samples, n=100)[98]

    @property
    def alone_median(self) -> float | None:
        return statistics.median(self.alone) if self.alone else None

    @property
    def disturbed(self) -> bool:
        """Whether it does worse beside the others than alone."""
        alone = self.alone_median
        return alone is not None and self.median > _WORSE * alone

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {**self.of, "contender": self.contender}
        if self.samples:
            found["calls_per_sample"] = self.calls_per_sample
            found |= self._statistics("", self.samples)
            if self.p99 is not None:
                found[f"p99_{self.unit}"] = round(self.p99, _DIGITS)
            if self.alone:
                found |= self._statistics("alone_", self.alone)
        if self.values:
            found["values"] = dict(self.values)
        if self.curves:
            found["curves"] = {name: list(points) for name, points in self.curves.items()}
        return found

    def _statistics(self, prefix: str, samples: Sequence[float]) -> dict[str, Any]:
        written = [round(sample, _DIGITS) for sample in samples]
        found = {
            "samples": written,
            "median": round(statistics.median(written), _DIGITS),
            "minimum": min(written),
            "mean": round(statistics.fmean(written), _DIGITS),
        }
        return {f"{prefix}{name}_{self.unit}": value for name, value in found.items()}


def measurements(of: Mapping[str, Any], found: Mapping[str, Samples]) -> list[Measurement]:
    """Make the measurements of one row from what interleave() returned."""
    return [
        Measurement(of, name, one.beside, alone=one.alone, calls_per_sample=one.calls)
        for name, one in found.items()
    ]


@dataclass(frozen=True)
class Result:
    benchmark: str
    machine: Mapping[str, Any]
    plan: Mapping[str, Any]
    sections: Mapping[str, str] = field(default_factory=dict)
    contenders: Mapping[str, str] = field(default_factory=dict)
    references: Sequence[str] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    measurements: Sequence[Measurement] = ()

    def to_json(self) -> str:
        document = asdict(self) | {"measurements": [one.to_dict() for one in self.measurements]}
        text = json.dumps(document, indent=1)
        # Numbers of a list on one line.
        return re.sub(r"\[[-\d.,e+\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": machine.cpu_model(),
        "cores": machine.cores(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "torch_hbmcomm": __version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Unavailable(RuntimeError):
    """This machine cannot run it; the message says why, and what to do."""


@dataclass
class Findings:
    """Measurements, filled while sections are measured.

    progress: told what comes next.
    unavailable: what was not measured, and why.
    notes: what else the reader should know.
    """

    progress: Callable[[str], None] = lambda what: None
    measurements: list[Measurement] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterable[Measurement]) -> None:
        self.measurements += found

    def of(self, section: str) -> list[Measurement]:
        return [one for one in self.measurements if one.of["section"] == section]


@dataclass(frozen=True)
class Section:
    """A part of a run.

    about: what it compares, in a line.
    measure: measures by the plan. Raises Unavailable, or PeerFailed when one of ours fails.
    streams: how many times its bytes an operation moves through memory, for a section that is shown
    in GB/s; 0: shown as times.
    columns: those of its table after the contenders: headings, and what makes their entries for a
    row.
    """

    name: str
    about: str
    measure: Callable[[Any, Findings], None]
    streams: int = 0
    columns: Mapping[str, Callable[[Mapping[str, Measurement]], Text | str]] = field(
        default_factory=dict
    )


def run(
    benchmark: str,
    sections: Mapping[str, Section],
    plan: Any,
    progress: Callable[[str], None] = lambda what: None,
    contenders: Mapping[str, str] | None = None,
) -> Result:
    """Measure the sections that `plan.sections` names; a section that is Unavailable is left out.

    Calls `progress` before each step, from no other thread. `plan` is a dataclass. Raises
    PeerFailed when a process of ours fails.
    """
    findings = Findings(progress)
    chosen = {name: section for name, section in sections.items() if name in plan.sections}
    for name, section in chosen.items():
        progress(name)
        try:
            section.measure(plan, findings)
        except Unavailable as error:
            findings.unavailable[name] = str(error)
    took_part = {one.contender for one in findings.measurements}
    options = asdict(plan)
    return Result(
        benchmark=benchmark,
        machine=describe_machine(),
        plan={
            name: str(value) if isinstance(value, Path) else value
            for name, value in options.items()
        },
        sections={name: section.about for name, section in chosen.items()},
        contenders={name: about for name, about in (contenders or {}).items() if name in took_part},
        unavailable=findings.unavailable,
        notes=findings.notes,
        measurements=findings.measurements,
    )


@contextmanager
def left_out_if_it_fails(who: str, findings: Findings, ours: bool = False) -> Iterator[None]:
    """Note why somebody fails, instead of raising Unavailable or PeerFailed; but raise for ours."""
    try:
        yield
    except (Unavailable, PeerFailed) as error:
        if ours:
            raise
        findings.unavailable[who] = str(error)


def check_names(kind: str, asked: Sequence[str], known: Iterable[str]) -> None:
    """Raise ValueError for an unknown name, naming those that there are."""
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        found = ", ".join(map(repr, unknown)) or "was named"
        raise ValueError(f"no {kind} {found}; there are: {', '.join(known)}")


def check_counts(plan: Any, least: Mapping[str, int]) -> None:
    """Raise ValueError for a field of the plan below its least."""
    for name, bound in least.items():
        if getattr(plan, name) < bound:
            raise ValueError(f"{name} is {getattr(plan, name)}; it is at least {bound}")
