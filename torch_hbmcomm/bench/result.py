"""What a run found, and its JSON form.

    {"machine": {"cpu", "cores", "python", "torch", "torch_hbmcomm", "time"},
     "contenders": [name, ...], "ranks": n, "rounds": n,
     "measurements": [{"collective", "bytes", "contender", "median_us", "samples_us"}, ...]}

A sample is one round: microseconds a call of the slowest rank. The collective "startup" is the time
from nothing to the end of a first collective, in fresh processes that have imported torch; it and
"barrier" have 0 bytes. "torch_hbmcomm" is null in a tree that is not installed.
"""

import json
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch

from torch_hbmcomm.bench import machine

STARTUP = "startup"


@dataclass(frozen=True)
class Measurement:
    collective: str
    bytes: int
    contender: str
    samples_us: list[float]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


@dataclass(frozen=True)
class Result:
    machine: dict[str, str | int | None]
    contenders: list[str]
    ranks: int
    rounds: int
    measurements: list[Measurement]

    @property
    def subject(self) -> str:
        """The contender that the others are compared with."""
        return "hbm" if "hbm" in self.contenders else self.contenders[0]

    def to_json(self) -> str:
        document = asdict(self)
        for entry, measurement in zip(document["measurements"], self.measurements, strict=True):
            entry["median_us"] = measurement.median_us
        return json.dumps(document, indent=1)


def describe_machine() -> dict[str, str | int | None]:
    return {
        "cpu": machine.cpu_model(),
        "cores": machine.cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_hbmcomm": machine.installed_version(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
