"""Runs a plan: the collectives in one set of ranks, each start in fresh processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hbmcomm.bench import rank
from torch_hbmcomm.bench.collectives import COLLECTIVES, DTYPES, STARTUP, Cell, cells
from torch_hbmcomm.bench.contender import Contender
from torch_hbmcomm.bench.contenders import CONTENDERS
from torch_hbmcomm.bench.interleave import Samples
from torch_hbmcomm.bench.launch import launch
from torch_hbmcomm.bench.names import check_names
from torch_hbmcomm.bench.result import Measurement, Result, describe_machine, slowest

_STARTUP = Cell(STARTUP, "float32", 0)


@dataclass(frozen=True)
class Plan:
    """What to measure. Raises ValueError for a name that does not exist or a count below its least.

    sizes: None gives each collective its own.
    startup_rounds: 0 leaves startup out.
    """

    contenders: Sequence[str] = tuple(CONTENDERS)
    collectives: Sequence[str] = tuple(COLLECTIVES)
    sizes: Sequence[int] | None = None
    dtypes: Sequence[str] = ("float32",)
    ranks: int = 2
    rounds: int = 21
    startup_rounds: int = 3

    def __post_init__(self) -> None:
        check_names("contender", self.contenders, CONTENDERS)
        check_names("collective", self.collectives, COLLECTIVES)
        check_names("dtype", self.dtypes, DTYPES)
        for name, least in (("ranks", 2), ("rounds", 1), ("startup_rounds", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least {least}")

    def cells(self) -> list[Cell]:
        return [
            cell
            for name in self.collectives
            for cell in cells(COLLECTIVES[name], self.sizes, self.dtypes, self.ranks)
        ]

    def unavailable(self) -> dict[str, str]:
        """Contenders that cannot run here, and why. Takes a while: some are compiled first."""
        found = {}
        for name in self.contenders:
            contender = CONTENDERS[name]
            if set(contender.dtypes).isdisjoint(self.dtypes):
                found[name] = _takes(contender)
            elif (cause := contender.why_unavailable()) is not None:
                found[name] = cause
        return found


def run(plan: Plan, unavailable: dict[str, str]) -> Result:
    """Leaves out who is unavailable. Raises RuntimeError when nobody is left or a rank fails."""
    names = [name for name in CONTENDERS if name in plan.contenders and name not in unavailable]
    if not names:
        raise RuntimeError("no contender can run here")
    refused = {
        f"{name}, {dtype}": _takes(CONTENDERS[name])
        for name in names
        for dtype in plan.dtypes
        if dtype not in CONTENDERS[name].dtypes
    }
    return Result(
        machine=describe_machine(),
        contenders={name: CONTENDERS[name].about for name in names},
        references=[name for name in names if CONTENDERS[name].reference],
        unavailable=unavailable | refused,
        ranks=plan.ranks,
        rounds=plan.rounds,
        measurements=_measure_collectives(plan, names) + _measure_startup(plan, names),
    )


def _measure_collectives(plan: Plan, names: Sequence[str]) -> list[Measurement]:
    cells = [cell for cell in plan.cells() if any(CONTENDERS[name].offers(cell) for name in names)]
    of_ranks: list[list[Samples]] = launch(plan.ranks, rank.measure, names, cells, plan.rounds)
    return [
        Measurement(
            cell.collective,
            cell.dtype,
            cell.bytes,
            name,
            slowest([samples[name] for samples in samples_of_ranks]),
        )
        for cell, *samples_of_ranks in zip(cells, *of_ranks, strict=True)
        for name in samples_of_ranks[0]
    ]


def _measure_startup(plan: Plan, names: Sequence[str]) -> list[Measurement]:
    starting = [name for name in names if CONTENDERS[name].offers(_STARTUP)]
    samples: dict[str, list[float]] = {name: [] for name in starting}
    for _ in range(plan.startup_rounds):
        for name in starting:
            samples[name].append(max(launch(plan.ranks, rank.startup, name)))
    return [
        Measurement(_STARTUP.collective, _STARTUP.dtype, _STARTUP.bytes, name, times)
        for name, times in samples.items()
        if times
    ]


def _takes(contender: Contender) -> str:
    return f"it takes {', '.join(contender.dtypes)}"
