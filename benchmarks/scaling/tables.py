"""The tables: measured times, fitted coefficients, and predictions for clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.scaling.growths import growths
from benchmarks.scaling.model import StoreCosts, gathering, iteration
from torch_hbmcomm.bench.result import Result

START, WORK = "start", "processor time of a start, a rank"
ALLREDUCE, STORE = "all_reduce of 8 B", "a step in the store"
CARRIED = (64, 1_000, 10_000)
_HEADING = tuple(f"{ranks:,} ranks" for ranks in CARRIED)

# The simulated boxes: their numbers; bytes of the model, and seconds of an iteration's computation;
# bytes per second of a link and of a box's memory, and how often a box moves each byte of the model
# (papers/README.md).
BOXES = (1, 10, 100)
_MODEL, _COMPUTATION = 100e6, 0.1
_LINK, _MEMORY, _MOVES = 12.5e9, 60e9, 5


class ScalingTable(NamedTuple):
    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(result: Result) -> list[ScalingTable]:
    costs = StoreCosts(**result.plan["store"])
    return [measured(result), fitted(result), carried(result), stores(costs), boxes()]


def measured(result: Result) -> ScalingTable:
    ranks = sorted({int(one.of["ranks"]) for one in result.measurements})
    rows = [
        [quantity, who, *(_milliseconds(row[count]) if count in row else "-" for count in ranks)]
        for quantity, who, row, _, _ in growths(result.measurements)
    ]
    return ScalingTable("Measured, ms", ["what", "who", *map(str, ranks)], rows)


def fitted(result: Result) -> ScalingTable:
    rows = [
        [
            *(quantity, who, _milliseconds(growth.a), _milliseconds(growth.b)),
            *(f"{growth.c * 1e6:.3g}", str(max(row)), f"{check:.2f}"),
        ]
        for quantity, who, row, growth, check in growths(result.measurements)
    ]
    heading = ["what", "who", "a, ms", "b, ms", "c, µs", "checked at", "model / measured"]
    return ScalingTable("Fitted to all but the largest number of ranks", heading, rows)


def carried(result: Result) -> ScalingTable:
    cores = int(result.machine["cores"])
    rows = [
        [quantity, who]
        + [_milliseconds(growth.with_a_core_each(ranks, cores)) for ranks in CARRIED]
        for quantity, who, _, growth, _ in growths(result.measurements)
        if quantity not in (WORK, STORE)
    ]
    return ScalingTable("Carried, with a core for each rank, ms", ["what", "who", *_HEADING], rows)


def stores(costs: StoreCosts) -> ScalingTable:
    """Return the simulated time of a step in the store, with records read singly or together."""
    rows = []
    for way, chosen in {
        "key by key": replace(costs, read=costs.question),
        "all keys in one request": costs,
    }.items():
        rows.append([way, *(_milliseconds(gathering(ranks, chosen)) for ranks in CARRIED)])
    return ScalingTable("A step in the store, simulated, ms", ["records are read", *_HEADING], rows)


def boxes() -> ScalingTable:
    """Return the simulated time of an iteration whose workers exchange their model with boxes."""
    rows = []
    for count in BOXES:
        service = _MODEL / count * max(1 / _LINK, _MOVES / _MEMORY)
        times = [_milliseconds(iteration(ranks, service, _COMPUTATION)) for ranks in CARRIED]
        rows.append([str(count), *times])
    return ScalingTable("An iteration with boxes, simulated, ms", ["boxes", *_HEADING], rows)


def _milliseconds(seconds: float) -> str:
    found = seconds * 1e3
    return f"{found:,.0f}" if found >= 99.5 else f"{found:.2g}"
