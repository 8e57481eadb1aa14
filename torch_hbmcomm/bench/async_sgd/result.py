"""What a run found, and its JSON form.

    {"machine": {"cpu", "cores", "python", "torch_hbmcomm", "time"},
     "sections": {name: what it compares}, "contenders": {name: what it is},
     "unavailable": {who: why}, "notes": [text, ...], "rounds": n,
     "measurements": [
         {"section", "scenario", "model", "bytes", "compute_ms", "workers", "contender",
          "samples_ms", "median_ms"}, ...],
     "trainings": [{"section", "contender", "case", "samples"}, ...]}

A sample is one iteration, the mean of all workers, in milliseconds: of communication in the
scenario "sequential", of the whole iteration in "parallel". The contender "link" is what a slow
link allows. Those of trainings are in their section's unit: steps of a worker in a second
(straggler), or percent of the test images, by seed (accuracy).
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby

from torch_hbmcomm.bench.async_sgd.training import Training
from torch_hbmcomm.bench.machine import Machine


@dataclass(frozen=True)
class Measurement:
    section: str
    scenario: str
    model: str
    bytes: int
    compute_ms: float
    workers: int
    contender: str
    samples_ms: list[float]
    median_ms: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median_ms", statistics.median(self.samples_ms))

    @property
    def not_hidden_ms(self) -> float:
        """Of communication, in the scenario "parallel". Less than a hundredth of the computation is
        what waking up takes: none."""
        over = self.median_ms - self.compute_ms
        return over if over > self.compute_ms / 100 else 0.0


@dataclass(frozen=True)
class Result:
    machine: Machine
    sections: dict[str, str]
    contenders: dict[str, str]
    unavailable: dict[str, str]
    notes: list[str]
    rounds: int
    measurements: list[Measurement]
    trainings: list[Training] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


Row = Mapping[str, Measurement]
"""By contender: one model, one number of workers."""


def rows(found: Sequence[Measurement]) -> Iterator[Row]:
    """Of one section and scenario."""
    for _, row in groupby(found, key=lambda one: (one.model, one.workers)):
        yield {measurement.contender: measurement for measurement in row}


def machine_line(result: Result) -> str:
    found = result.machine
    return f"{found['cpu']}, {found['cores']} cores, {result.rounds} rounds"
