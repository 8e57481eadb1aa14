"""What a run found, and its JSON form.

    {"machine": {"cpu", "cores", "python", "torch_hbmcomm", "time"},
     "sections": {name: what it compares}, "unavailable": {who: why}, "notes": [text, ...],
     "rounds": n,
     "measurements": [
         {"section", "operation", "bytes", "contender", "clients", "samples_us", "median_us",
          "p99_us", "smallest_share"}, ...]}

A sample is one round: microseconds for `bytes`, by all clients together. p99_us is there where
every operation was timed by itself, and is of all of them. smallest_share is there where several
clients worked at a time: what the slowest moved, over an equal share of what all moved.
"""

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from torch_hbmcomm.bench.box.interleave import Samples
from torch_hbmcomm.bench.machine import Machine


@dataclass(frozen=True)
class Measurement:
    section: str
    operation: str
    bytes: int
    contender: str
    samples_us: list[float]
    clients: int = 1
    p99_us: float | None = None
    smallest_share: float | None = None
    median_us: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median_us", statistics.median(self.samples_us))


@dataclass(frozen=True)
class Result:
    machine: Machine
    sections: dict[str, str]
    unavailable: dict[str, str]
    notes: list[str]
    rounds: int
    measurements: list[Measurement]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def measurements(
    section: str, operation: str, size: int, samples: Samples
) -> Iterable[Measurement]:
    return (
        Measurement(section, operation, size, contender, times)
        for contender, times in samples.items()
    )


def machine_line(result: Result) -> str:
    found = result.machine
    return f"{found['cpu']}, {found['cores']} cores, median of {result.rounds} rounds"
