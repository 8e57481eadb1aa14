"""The result of a run, section by section, and its JSON form.

    {"benchmark": name,
     "machine": {"cpu", "cores", "python", "torch", "torch_hbmcomm", "commit", "modified", "time"},
     "plan": {"ranks", "rounds", ...}, "sections": {name: description},
     "contenders": {name: description}, "references": [name, ...], "unavailable": {name: cause},
     "notes": [text, ...],
     "measurements": [
         {..., "contender", "calls_per_sample", "n", "minimum_us", "lower_quartile_us",
          "median_us", "upper_quartile_us", "maximum_us", "mean_us", "p99_us",
          "alone_n", "alone_minimum_us", ...,
          "values": {name: number}, "curves": {name: [number, ...]}}, ...]}

A measurement begins with the fields that name its row, such as "collective", "dtype" and "bytes". A
sample is the time of a single call (rounds.py says when it is the mean of several), on the slowest
rank if there are several ranks. The record does not have the "n" samples, but their statistics
(summary.py), with the unit in the names. "p99_us" needs 200 samples. The fields "alone_..." are the
same statistics for rounds in which this contender ran without the others. "values" and "curves" are
further results; their names end in the unit. A reference is a contender that does only a part of
the job, and shows the cost of that part. "unavailable" gives the cause why something was not
measured: a contender, a contender with a type ("mpich, bfloat16"), or a section. "torch" is null
without PyTorch. "commit" and "modified" are the checkout's when the measurement ended
(checkout.py), and null without a checkout. Older records lack them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.text import Text

from torch_hbmcomm import machine
from torch_hbmcomm.bench import checkout
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.rounds import Samples
from torch_hbmcomm.bench.summary import Summary
from torch_hbmcomm.version import __version__

_ALONE = "alone_"  # prefix of the figures of rounds without the other contenders
_WORSE = 1.1  # interleaved median over median alone: a larger ratio is more than noise


@dataclass(frozen=True)
class Measurement:
    """The figures of one contender in one row.

    of: the fields that name the row, as in {"operation": "read", "bytes": 4096}.
    samples, alone: statistics of the samples, in `unit`; None without samples.
    """

    of: Mapping[str, Any]
    contender: str
    samples: Summary | None = None
    unit: str = "us"
    alone: Summary | None = None
    calls_per_sample: int = 1
    values: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def summary(self) -> Summary:
        """The statistics of the samples. Raises ValueError without samples."""
        if self.samples is None:
            raise ValueError(f"{self.contender} has no samples of {dict(self.of)}")
        return self.samples

    @property
    def median(self) -> float:
        return self.summary.median

    @property
    def minimum(self) -> float:
        return self.summary.minimum

    @property
    def mean(self) -> float:
        return self.summary.mean

    @property
    def disturbed(self) -> bool:
        """True if the contender is slower in rounds with the others than alone, by more than a
        tenth."""
        return self.alone is not None and self.median > _WORSE * self.alone.median

    def to_record(self) -> dict[str, Any]:
        found: dict[str, Any] = {**self.of, "contender": self.contender}
        if self.samples is not None:
            found["calls_per_sample"] = self.calls_per_sample
            found |= self.samples.to_record("", self.unit)
        if self.alone is not None:
            found |= self.alone.to_record(_ALONE, self.unit)
        if self.values:
            found["values"] = dict(self.values)
        if self.curves:
            found["curves"] = {name: list(points) for name, points in self.curves.items()}
        return found

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Measurement:
        unit = next((name[7:] for name in record if name.startswith("median_")), "us")
        known = {one.name for one in fields(cls)}
        known |= {*Summary.names("", unit).values(), *Summary.names(_ALONE, unit).values()}
        return cls(
            of={name: value for name, value in record.items() if name not in known},
            contender=record["contender"],
            samples=Summary.from_record(record, "", unit),
            unit=unit,
            alone=Summary.from_record(record, _ALONE, unit),
            calls_per_sample=record.get("calls_per_sample", 1),
            values=record.get("values", {}),
            curves=record.get("curves", {}),
        )


def sampled(
    of: Mapping[str, Any],
    contender: str,
    samples: Sequence[float],
    unit: str = "us",
    alone: Sequence[float] = (),
    **more: Any,
) -> Measurement:
    """Make a measurement of samples. more: further fields of Measurement."""
    return Measurement(
        of,
        contender,
        Summary.of(samples) if samples else None,
        unit,
        Summary.of(alone) if alone else None,
        **more,
    )


def measurements(of: Mapping[str, Any], found: Mapping[str, Samples]) -> list[Measurement]:
    """Make the measurements of one row from the result of interleave()."""
    return [
        sampled(of, name, one.interleaved, alone=one.alone, calls_per_sample=one.calls)
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
        """Return the JSON form, with a line for each measurement."""
        head = {one.name: getattr(self, one.name) for one in fields(self)[:-1]}
        lines = ",\n  ".join(json.dumps(one.to_record()) for one in self.measurements)
        begun = json.dumps(head, indent=1).removesuffix("\n}")
        return f'{begun},\n "measurements": [\n  {lines}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read a result from its JSON form."""
        found = json.loads(text)
        records = found.pop("measurements")
        return cls(**found, measurements=[Measurement.from_record(one) for one in records])


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": machine.cpu_model(),
        "cores": machine.cores(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "torch_hbmcomm": __version__,
        **checkout.state(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Unavailable(RuntimeError):
    """This machine cannot run a section or a contender; the message says why, and what to do."""


@dataclass
class Findings:
    """Measurements, filled while sections are measured.

    progress: called with the name of each next step.
    unavailable: the names of the parts that were not measured, each with the cause.
    notes: further texts for the reader.
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

    about: a description in a line.
    measure: the function that measures the section as the plan says. It raises Unavailable, or
    PeerFailed if a process of hbm's fails.
    streams: 0 for a section that is shown as times. For a section that is shown in GB/s: the bytes
    that an operation moves through memory, divided by the operation's size.
    columns: the table's columns after the contenders. For each heading, a function that makes the
    entry of a row.
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

    Calls `progress` before each step, in the calling thread. `plan` is a dataclass. Raises
    PeerFailed if a process of hbm's fails.
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
    """If the block raises Unavailable or PeerFailed, record it as the cause for `who` in
    `findings`. With `ours` (hbm's own contender), let it raise instead."""
    try:
        yield
    except (Unavailable, PeerFailed) as error:
        if ours:
            raise
        findings.unavailable[who] = str(error)


def check_names(kind: str, asked: Sequence[str], known: Iterable[str]) -> None:
    """Raise ValueError if `asked` is empty or has an unknown name. The error lists all known
    names."""
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        found = ", ".join(map(repr, unknown)) or "was named"
        raise ValueError(f"no {kind} {found}; there are: {', '.join(known)}")


def check_counts(plan: Any, least: Mapping[str, int]) -> None:
    """Raise ValueError if a field of the plan is less than the field's number in `least`."""
    for name, bound in least.items():
        if getattr(plan, name) < bound:
            raise ValueError(f"{name} is {getattr(plan, name)}; it is at least {bound}")
