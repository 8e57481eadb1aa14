"""The measurements of the sections: a row for each contender and case. A case is a table's title.

table.py lists the names of values. A hook that drops also has "steps", the steps that it counted,
and "aim", the intended "counted_share". Samples are milliseconds of an iteration, of a pass over
memory, or of a search or comparison. The sections training and server-training have curves, with a
point for each epoch or evaluation: "steps", "seconds", "loss" and "accuracy", means over the seeds.
"accuracy_seed_0" is the accuracy of the first seed, and so on. Curves "..._by_seed" have the final
value of each seed. A contender "paper: ..." has the figures of Lee et al. (2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.verdict import Verdict
from torch_hbmcomm.bench.result import (
    Measurement,
    sampled,
)

_MORE = 0.05


def row(
    section: str,
    case: str,
    contender: str,
    values: Mapping[str, float],
    milliseconds: Sequence[float] = (),
    curves: Mapping[str, Sequence[float]] | None = None,
) -> Measurement:
    return sampled(
        {"section": section, "case": case},
        contender,
        milliseconds,
        "ms",
        values=values,
        curves=curves or {},
    )


def cases(rows: Sequence[Measurement]) -> dict[str, dict[str, Measurement]]:
    """Group rows by case and contender, in the order of measurement. REQUIRES: one section."""
    found: dict[str, dict[str, Measurement]] = {}
    for one in rows:
        found.setdefault(one.of["case"], {})[one.contender] = one
    return found


def in_proportion(row: Measurement) -> Verdict:
    """Judge if the time shrank in proportion to the bytes, a goal of several sections."""
    sent, took = row.values["bytes_share"], row.values["time_share"]
    more = took / sent - 1
    return Verdict(
        f"{row.of['case']}, {row.contender}: {sent:.1%} of the bytes take {took:.1%} of the time, "
        f"{more:+.1%} (≤ {_MORE:+.0%})",
        more <= _MORE,
    )
