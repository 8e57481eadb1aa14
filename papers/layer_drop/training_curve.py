"""Loss and accuracy of a training over time, and the comparison of two trainings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from papers.layer_drop.plan import link
from papers.layer_drop.rows import row
from torch_hbmcomm.bench.result import Measurement

POINTS = 0.5
"""The largest loss of accuracy, in points, that counts as equal to plain training."""


@dataclass(frozen=True)
class Curve:
    """Loss and accuracy at each evaluation; steps and seconds since the start."""

    steps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    def look(self, steps: int, seconds: float, loss: float, accuracy: float) -> None:
        """Add a point, `steps` and `seconds` after the point before."""
        self.steps.append((self.steps or [0.0])[-1] + steps)
        self.seconds.append((self.seconds or [0.0])[-1] + seconds)
        self.loss.append(loss)
        self.accuracy.append(accuracy)

    def until(self, accuracy: float) -> float | None:
        """Return the seconds until `accuracy` is reached; None if it is never reached."""
        points = zip(self.seconds, self.accuracy, strict=True)
        return next((at for at, found in points if found >= accuracy), None)


def mean(curves: Sequence[Curve]) -> Curve:
    def of(columns: Iterable[Sequence[float]]) -> list[float]:
        return [statistics.fmean(look) for look in zip(*columns, strict=True)]

    return Curve(
        of(one.steps for one in curves),
        of(one.seconds for one in curves),
        of(one.loss for one in curves),
        of(one.accuracy for one in curves),
    )


def learned(
    section: str,
    case: str,
    name: str,
    found: Sequence[Curve],
    plain: Sequence[Curve],
    more: Mapping[str, float] | None = None,
) -> Measurement:
    """Make the row of a contender. found, plain: a curve for each seed; `plain` may have more."""
    pairs = list(zip(found, plain, strict=False))
    own, base = mean(found), mean(plain[: len(found)])
    values = {
        "iteration_ms": 1e3 * own.seconds[-1] / own.steps[-1],
        "seconds": own.seconds[-1],
        "loss": own.loss[-1],
        "accuracy": own.accuracy[-1],
        "points": own.accuracy[-1] - base.accuracy[-1],
    }
    target = base.accuracy[-1] - POINTS
    until, base_until = own.until(target), base.until(target)
    if until is not None and base_until is not None:
        values |= {"target_seconds": until, "sooner": base_until / until}
    seeds = {
        "accuracy_by_seed": [one.accuracy[-1] for one in found],
        "loss_by_seed": [one.loss[-1] for one in found],
        "seconds_by_seed": [one.seconds[-1] for one in found],
        "points_by_seed": [one.accuracy[-1] - other.accuracy[-1] for one, other in pairs],
        "sooner_by_seed": [_sooner(one, other) for one, other in pairs],
    } | {f"accuracy_seed_{seed}": one.accuracy for seed, one in enumerate(found)}
    return row(section, case, name, values | dict(more or {}), curves=seeds | asdict(own))


Train = Callable[[int], tuple[Curve, float]]
"""Trains a contender with a seed. Returns the curve, and the megabytes over the link in both
directions."""


def trained(
    section: str,
    case: str,
    seeds: int,
    contenders: Mapping[str, Train],
    progress: Callable[[str], None],
) -> Iterator[Measurement]:
    """Train the contenders with each seed, and yield their rows. The first one sends everything."""
    curves: dict[str, list[Curve]] = {name: [] for name in contenders}
    crossed: dict[str, list[float]] = {name: [] for name in contenders}
    for seed in range(seeds):
        for name, train in contenders.items():
            progress(f"{section}, {case}: seed {seed}, {name}")
            curve, megabytes = train(seed)
            curves[name].append(curve)
            crossed[name].append(megabytes)
    plain = next(iter(contenders))
    all_bytes, all_seconds = statistics.fmean(crossed[plain]), mean(curves[plain]).seconds[-1]
    for name, found in curves.items():
        shares = {
            "bytes_share": statistics.fmean(crossed[name]) / all_bytes,
            "iteration_share": mean(found).seconds[-1] / all_seconds,
        }
        yield learned(section, case, name, found, curves[plain], shares)


def case_of(megabits: int | None, optimizer: str, steps: int, seeds: int) -> str:
    """Return the name of a case of trained()."""
    case = f"{link(megabits)}, {optimizer}, steps: {steps}"
    return case + (f", means of {seeds} seeds" if seeds > 1 else ", one seed")


def _sooner(own: Curve, plain: Curve) -> float:
    """Return plain's seconds to its final accuracy less POINTS, over own seconds to the same
    accuracy; 0 if this accuracy is never reached."""
    target = plain.accuracy[-1] - POINTS
    until, plain_until = own.until(target), plain.until(target)
    return plain_until / until if until is not None and plain_until is not None else 0.0
