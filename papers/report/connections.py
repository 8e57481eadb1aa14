"""Connections to a peer: Zhang and Jung 2017, Figs. 2 to 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.box.native import SOCKETS
from benchmarks.box.sections import SECTIONS
from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    EQUAL,
    LONG_TAIL,
    ZHANG,
    Claim,
    Outcome,
    Spread,
    graded,
    samples,
)
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import format_bytes

_CONNECTIONS = (1, 2, 4, 6, 8)
_OURS = "hbm tcp"


def _run_of(connections: int) -> str:
    return f"connections-{connections}"


def _measured(results: Mapping[str, Result]) -> Iterator[tuple[int, Measurement]]:
    """Yield each measurement of the box, with its number of connections."""
    for connections in _CONNECTIONS:
        if found := results.get(_run_of(connections)):
            for one in found.measurements:
                if one.contender == _OURS:
                    yield connections, one


def _table(results: Mapping[str, Result]) -> Table:
    cells: dict[tuple[str, int], dict[int, report.Row]] = {}
    for count in _CONNECTIONS:
        if found := results.get(_run_of(count)):
            for row in report.rows(found.measurements):
                of = row[_OURS].of
                cells.setdefault((of["operation"], of["bytes"]), {})[count] = row
    rows = [
        [operation, format_bytes(size), *(_cell(found.get(count)) for count in _CONNECTIONS)]
        for (operation, size), found in cells.items()
    ]
    unit = "GB/s (share of plain sockets' rate, max / median time)"
    heading = ["operation", "size", *(f"{count}: {unit}" for count in _CONNECTIONS)]
    return Table(heading, rows)


def _cell(row: report.Row | None) -> str:
    """Return the rate, its share of the plain sockets' rate in the same run, and the tail.

    The tail is the longest time over the median.
    """
    if row is None:
        return "-"
    ours, theirs = row[_OURS], row[SOCKETS]
    speed = report.rate(SECTIONS["tcp"], ours)
    tail = ours.summary.maximum / ours.median
    return f"{speed:.2f} ({theirs.median / ours.median:.0%}, {tail:.1f})"


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    for connections, one in _measured(results):
        title = f"{one.of['operation']} over tcp"
        panel = panels.setdefault(title, Panel(title, "bytes", "GB/s", logarithmic=True))
        sizes, rates, _ = panel.lines.setdefault(f"connections: {connections}", ([], [], "-"))
        sizes.append(one.of["bytes"])
        rates.append(report.rate(SECTIONS["tcp"], one))
    return list(panels.values())


def _rates(results: Mapping[str, Result]) -> dict[tuple[str, int], dict[int, float]]:
    """Return the GB/s by operation and size, then by the number of connections."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for connections, one in _measured(results):
        rates = found.setdefault((one.of["operation"], one.of["bytes"]), {})
        rates[connections] = report.rate(SECTIONS["tcp"], one)
    return found


def _more(results: Mapping[str, Result]) -> Outcome:
    best = [
        max(rate for count, rate in rates.items() if count > 1) / rates[1]
        for rates in _rates(results).values()
        if 1 in rates and len(rates) > 1
    ]
    ratio = Spread.of(best, "several connections and one")
    return Outcome(
        f"With the best number of connections, the throughput is"
        f" {ratio.times('the throughput of one connection')}.",
        graded(ratio.median > EQUAL, ratio.most > EQUAL),
        "One client on two cores has all connections, over TCP on loopback; in the paper each"
        " connection has a thread at each end.",
    )


def _tails(results: Mapping[str, Result]) -> Outcome:
    tails = [one.summary.maximum / one.median for _, one in _measured(results)]
    ratio = Spread.of(tails, "the longest time and the median")
    return Outcome(
        f"The longest time is {ratio.times('the median')}.",
        graded(ratio.median >= LONG_TAIL, ratio.most >= LONG_TAIL),
        "The paper states no number, and a loss by tails is not judged;"
        f" {samples(one for _, one in _measured(results))}.",
    )


_CLAIMS = (
    Claim(
        ZHANG,
        "Figs. 2 and 3, findings 3 and 6, large transfers",
        "Several connections have a higher throughput than one.",
        _more,
        "It holds if the gain is more than 10 % in the median, and in part if in some cell.",
    ),
    Claim(
        ZHANG,
        "Fig. 4, finding 7, large transfers",
        "Latencies can have long tails, which degrade the performance.",
        _tails,
        "It holds if in the median cell the longest time is at least twice the median time, and in"
        " part if it is in some cell.",
    ),
)


CONNECTIONS = Experiment(
    name="connections",
    figures="Figs. 2 to 4, large transfers of one client",
    label=Label.MEASURED,
    differs=(
        "TCP over loopback between a box and one client, from 64 KiB on, replaces SCIF between"
        " cores and Xeon Phis. One client has all connections; in the paper each connection has a"
        " thread at each end. The box authenticates its data, and plain sockets do not. The speed"
        " of plain sockets varies more than the box's. The next section has smaller messages, and"
        " several threads."
    ),
    claims=_CLAIMS,
    runs=tuple(
        Run(
            _run_of(count),
            "benchmarks.box",
            ["--sections=tcp", f"--lanes={count}", "--largest=4MiB"],
            ["--sections=tcp", f"--lanes={count}", "--quick"],
        )
        for count in _CONNECTIONS
    ),
    table=_table,
    panels=_panels,
)
