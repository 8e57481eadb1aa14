"""Runs a plan: the collectives in one set of ranks, each start in fresh processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_hbmcomm.bench import rank
from torch_hbmcomm.bench.collectives import COLLECTIVES
from torch_hbmcomm.bench.contenders import CONTENDERS
from torch_hbmcomm.bench.launch import launch
from torch_hbmcomm.bench.result import STARTUP, Measurement, Result, describe_machine


@dataclass(frozen=True)
class Plan:
    """What to measure. Raises ValueError for a name that does not exist or a count below its least.

    startup_rounds: 0 leaves startup out.
    """

    contenders: Sequence[str]
    collectives: Sequence[str]
    sizes: Sequence[int]
    ranks: int = 2
    rounds: int = 15
    startup_rounds: int = 5

    def __post_init__(self) -> None:
        _check_names("contender", self.contenders, CONTENDERS)
        _check_names("collective", self.collectives, COLLECTIVES)
        for name, least in (("ranks", 2), ("rounds", 1), ("startup_rounds", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least {least}")

    def cells(self) -> list[rank.Cell]:
        """Sizes that round to the same possible one are measured once."""
        chosen = [COLLECTIVES[name] for name in self.collectives]
        cells = [
            rank.Cell(collective.name, collective.bytes_near(size, self.ranks))
            for collective in chosen
            for size in self.sizes
        ]
        return list(dict.fromkeys(cells))


def run(plan: Plan) -> Result:
    """Raises RuntimeError when a contender cannot run here or a rank fails."""
    for name in plan.contenders:
        cause = CONTENDERS[name].why_unavailable()
        if cause is not None:
            raise RuntimeError(cause)
    return Result(
        machine=describe_machine(),
        contenders=list(plan.contenders),
        ranks=plan.ranks,
        rounds=plan.rounds,
        measurements=_measure_collectives(plan) + _measure_startup(plan),
    )


def _measure_collectives(plan: Plan) -> list[Measurement]:
    of_ranks: list[rank.Samples] = launch(
        plan.ranks, rank.measure, plan.contenders, plan.cells(), plan.rounds
    )
    measurements = []
    for cell, name in of_ranks[0]:
        samples = _slowest(own[cell, name] for own in of_ranks)
        measurements.append(Measurement(cell.collective, cell.bytes, name, samples))
    return measurements


def _measure_startup(plan: Plan) -> list[Measurement]:
    samples: dict[str, list[float]] = {name: [] for name in plan.contenders}
    for _ in range(plan.startup_rounds):
        for name in plan.contenders:
            samples[name].append(max(launch(plan.ranks, rank.startup, name)))
    return [Measurement(STARTUP, 0, name, times) for name, times in samples.items() if times]


def _slowest(samples_of_ranks: Iterable[list[float]]) -> list[float]:
    """A round is over when its last rank is."""
    return [max(times) for times in zip(*samples_of_ranks, strict=True)]


def _check_names(kind: str, asked: Sequence[str], known: Iterable[str]) -> None:
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        found = ", ".join(map(repr, unknown)) or "was named"
        raise ValueError(f"no {kind} {found}; there are: {', '.join(known)}")
