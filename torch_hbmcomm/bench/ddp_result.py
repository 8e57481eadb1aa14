"""What a run of DistributedDataParallel found, and its JSON form.

    {"machine": as in result.py, "contenders": [name, ...], "models": {name: what it is},
     "ranks": n, "rounds": n,
     "measurements": [{"model", "contender", "phase", "median_us", "samples_us"}, ...]}

Phases are "step", "step without communication" and "allreduce alone"; a sample is one round:
microseconds of the slowest rank.
"""

import json
import statistics
from dataclasses import asdict, dataclass, field

from torch_hbmcomm.bench.machine import Machine

STEP = "step"
WITHOUT = "step without communication"
ALLREDUCE = "allreduce alone"
PHASES = (STEP, WITHOUT, ALLREDUCE)


@dataclass(frozen=True)
class Measurement:
    model: str
    contender: str
    phase: str
    samples_us: list[float]
    median_us: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median_us", statistics.median(self.samples_us))


@dataclass(frozen=True)
class Result:
    machine: Machine
    contenders: list[str]
    models: dict[str, str]
    ranks: int
    rounds: int
    measurements: list[Measurement]

    def median_us(self, model: str, contender: str, phase: str) -> float:
        asked = (model, contender, phase)
        for found in self.measurements:
            if (found.model, found.contender, found.phase) == asked:
                return found.median_us
        raise KeyError(asked)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)
