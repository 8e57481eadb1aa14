"""Layer dropping next to later ways to send gradients, under DDP: Lee et al. 2020, section 6.1."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.layer_drop import ddp
from papers.layer_drop.plot import panels as panels_of_dropping
from papers.layer_drop.training_curve import POINTS
from papers.layer_drop.ways import NAME, WAYS, named
from papers.report.experiment import Experiment, Label, Run
from papers.report.seeds import SEEDS, SENT, Seeds, entry, runs_of
from papers.report.verdicts import LEE, Claim, Outcome, Unmeasured, graded, percent
from torch_hbmcomm.bench.result import Measurement, Result

_RUN = "layer-drop-ways"
_TABLE = "layer-drop-ddp"
_WHOLE = ("bytes", "paper")  # drop whole layers; the others are later ways
_LATER = [way for way in WAYS if way not in _WHOLE]
_RATIOS = (0.9, 0.95)


def _table(results: Mapping[str, Result]) -> Table:
    rows = [_row(one) for result in results.values() for one in result.measurements]
    heading = ["network", "who", "compute, ms", "communication, ms", "an iteration, ms", "bytes"]
    heading += ["loss", "accuracy, %", "points compared with all sent", "seconds"]
    return Table(heading, rows)


def _row(one: Measurement) -> list[str]:
    """Return a row of the table. A time below nothing is noise, and has a dash."""
    times = [
        f"{one.values[name]:.0f}" if one.values.get(name, -1.0) >= 0 else "-"
        for name in ("compute_ms", "communication_ms", "iteration_ms")
    ]
    forms = {"loss": ".3f", "accuracy": ".2f", "points": "+.2f", "seconds": ".1f"}
    figures = (
        [entry(one, name, form) for name, form in forms.items()]
        if one.curves
        else ["-"] * len(forms)
    )
    case = f"{one.of['case']}, ResNet-50" if one.of["section"] == ddp.NAME else one.of["case"]
    return [case, one.contender, *times, f"{one.values['bytes_share']:.1%}", *figures]


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return [one for result in results.values() for one in panels_of_dropping(result)[0]]


def _fewest(result: Result, ways: Collection[str]) -> Measurement | None:
    """Return the training with the fewest bytes that ends at most POINTS lower than all sent, in
    the mean; None if all end lower.

    ways: the ways of the trainings. Raises Unmeasured if a way was not measured.
    """
    trainings = {one.contender: one for one in result.measurements}
    names = [named(way, ratio) for way in ways for ratio in result.plan["ratios"]]
    if missing := [name for name in names if name not in trainings]:
        raise Unmeasured(f"The record has no {missing[0]}.")
    equal = [
        trainings[name] for name in names if Seeds.of(trainings[name], "points").mean >= -POINTS
    ]
    return min(equal, key=lambda one: one.values["bytes_share"], default=None)


def _sends(one: Measurement | None) -> float:
    return 1.0 if one is None else float(one.values["bytes_share"])


def _shown(one: Measurement | None, of: str) -> str:
    if one is None:
        return f"no {of}"
    points = Seeds.of(one, "points").text()
    return f"{percent(_sends(one))} by {of} ({one.contender}: {points} points)"


def _equal(results: Mapping[str, Result]) -> Outcome:
    trainings = [result for name, result in results.items() if name != _TABLE]
    found = {
        ", ".join(result.plan["optimizers"]): [_fewest(result, ways) for ways in (_WHOLE, _LATER)]
        for result in trainings
    }
    shown = "; ".join(
        f"{_shown(whole, 'whole layers')}, {_shown(later, 'later ways')}, with {optimizer}"
        for optimizer, (whole, later) in found.items()
    )
    return Outcome(
        f"The fewest bytes with equal accuracy are {shown}.",
        graded(
            all(_sends(whole) <= SENT for whole, _ in found.values()),
            all(min(map(_sends, both)) <= SENT for both in found.values()),
        ),
        f"R is {' or '.join(map(str, _RATIOS))}, under DDP instead of a parameter server; a small"
        " net learns MNIST, and a mean of seeds has its standard error after ±.",
    )


_CLAIMS = (
    Claim(
        LEE,
        "Section 6.1, with later ways",
        "At 1 Gbit/s, accuracy is equal in the end, and communication takes 5 % of the time.",
        _equal,
        f"Equal means at most {POINTS} points lower in the mean. It holds if with each optimizer"
        " whole layers (targets bytes or paper) are equal with at most 5.8 % of the bytes, and in"
        " part if with each optimizer some way is.",
    ),
)


LATER_WAYS = Experiment(
    name=_RUN,
    figures="Table 1, Figs. 5 to 8, later ways",
    label=Label.EMULATED,
    differs=(
        "DDP replaces the parameter server: 4 ranks on two hosts, joined by a link of 1 Gbit/s. The"
        " first rows are in the form of Table 1. Their gradients have ResNet-50's sizes and need"
        " almost no computation. The other rows train the net of the section layer-drop-training"
        f" with {SEEDS} seeds. The ways bytes, paper and blocks are targets of LayerDrop, the first"
        " two for whole layers. Low rank and PowerSGD send factors of the gradients. PowerSGD has"
        " the largest rank that sends no more bytes than 1 - R."
    ),
    claims=_CLAIMS,
    runs=(
        Run(
            _TABLE,
            "papers.layer_drop",
            [
                f"--sections={ddp.NAME}",
                "--megabits=1000",
                f"--ratios={','.join(map(str, _RATIOS))}",
            ],
            [f"--sections={ddp.NAME}", "--quick"],
        ),
        *runs_of(_RUN, NAME, f"--ratios={','.join(map(str, _RATIOS))}"),
    ),
    table=_table,
    panels=_panels,
)
