"""What a run of the collectives found, and its JSON form.

    {"machine": {"cpu", "cores", "python", "torch", "torch_hbmcomm", "time"},
     "contenders": {name: what it is}, "references": [name, ...], "unavailable": {who: why},
     "ranks": n, "rounds": n,
     "measurements": [
         {"collective", "dtype", "bytes", "contender", "median_us", "samples_us"}, ...]}

A sample is one round: microseconds a call of the slowest rank. Contenders are compared with the
first one; references do not do the whole job and show what that would cost. Who is unavailable is a
contender, or one in some type ("mpich, bfloat16"). The collective
"startup" is the time from nothing to the end of a first collective, in fresh processes that have
imported torch; it and "barrier" have 0 bytes. "torch_hbmcomm" is null in a tree that is not
installed.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from torch_hbmcomm.bench import machine
from torch_hbmcomm.bench.machine import Machine


@dataclass(frozen=True)
class Measurement:
    collective: str
    dtype: str
    bytes: int
    contender: str
    samples_us: list[float]
    median_us: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median_us", statistics.median(self.samples_us))


@dataclass(frozen=True)
class Result:
    machine: Machine
    contenders: dict[str, str]
    references: list[str]
    unavailable: dict[str, str]
    ranks: int
    rounds: int
    measurements: list[Measurement]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def slowest(samples_of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """A round is over when its last rank is."""
    return [max(times) for times in zip(*samples_of_ranks, strict=True)]


def describe_machine() -> Machine:
    return {**machine.describe_machine(), "torch": torch.__version__}


def machine_line(machine: Machine, ranks: int, rounds: int) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {ranks} ranks, "
        f"median of {rounds} rounds, torch {machine['torch']}"
    )
