"""Connections to a peer: Zhang and Jung 2017, Figs. 2 to 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.box.sections import SECTIONS
from benchmarks.panels import Panel
from benchmarks.report.experiment import Experiment, Label, Run, Table
from torch_hbmcomm.bench.report import rate
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import format_bytes

_CONNECTIONS = (1, 2, 4, 6, 8)
_OURS = "hbm tcp"


def _run_of(connections: int) -> str:
    return f"connections-{connections}"


def _measured(results: Mapping[str, Result]) -> Iterator[tuple[int, Measurement]]:
    """Yield the number of connections and a measurement of the box's."""
    for connections in _CONNECTIONS:
        if found := results.get(_run_of(connections)):
            for one in found.measurements:
                if one.contender == _OURS:
                    yield connections, one


def _table(results: Mapping[str, Result]) -> Table:
    cells: dict[tuple[str, int], dict[int, Measurement]] = {}
    for connections, one in _measured(results):
        cells.setdefault((one.of["operation"], one.of["bytes"]), {})[connections] = one
    rows = [
        [operation, format_bytes(size)] + [_cell(found.get(count)) for count in _CONNECTIONS]
        for (operation, size), found in cells.items()
    ]
    heading = ["operation", "size", *(f"{count}: GB/s (max / median)" for count in _CONNECTIONS)]
    return Table(heading, rows)


def _cell(one: Measurement | None) -> str:
    if one is None:
        return "-"
    return f"{rate(SECTIONS['tcp'], one):.2f} ({max(one.samples) / one.median:.1f})"


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    for connections, one in _measured(results):
        title = f"{one.of['operation']} over tcp"
        panel = panels.setdefault(title, Panel(title, "bytes", "GB/s", logarithmic=True))
        sizes, rates, _ = panel.lines.setdefault(f"connections: {connections}", ([], [], "-"))
        sizes.append(one.of["bytes"])
        rates.append(rate(SECTIONS["tcp"], one))
    return list(panels.values())


CONNECTIONS = Experiment(
    name="connections",
    paper="Zhang, Jung 2017, An In-depth Performance Analysis of Many-Integrated Core",
    figures="Figs. 2 to 4, large transfers of one client",
    label=Label.MEASURED,
    differs=(
        "TCP over loopback between a box and one client, from 64 KiB on, instead of SCIF between"
        " cores and Xeon Phis; with more connections than cores from 4 on. Smaller messages are in"
        " the next section."
    ),
    found=(
        "Several connections are faster than one, and four are enough for RMA; more threads on one"
        " do not help (findings 2, 3, 5 and 6).",
        "Latencies have long tails (finding 7).",
    ),
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
