"""Messages of all sizes over several connections and threads: Zhang and Jung 2017, Figs. 2 to 4."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.connections.__main__ import (
    AGGREGATION,
    CONNECTIONS,
    MESSAGES,
    OPERATIONS,
    THREADS,
    TRANSPORTS,
    WAYS,
)
from papers.report.experiment import Experiment, Label, Run, number
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import KIB, format_bytes

_RUN = "messages"
_LATENCIES = ("min_us", "mean_us", "p99_us", "max_us")
_AGGREGATED = 512  # finding 1 recommends to aggregate smaller messages to this size
_LARGE = 64 * KIB
_SHOWN = 4 * KIB  # size of the messages whose latencies are drawn by connection
_MESSAGES, _RMA = (f"hbm {transport}" for transport in TRANSPORTS)


def _of(results: Mapping[str, Result], section: str) -> list[Measurement]:
    return [one for one in results[_RUN].measurements if one.of["section"] == section]


def _rates(found: Sequence[Measurement]) -> dict[tuple[str, str, int], dict[int, Measurement]]:
    """Group by contender, operation and size, then by the number of connections or threads."""
    cells: dict[tuple[str, str, int], dict[int, Measurement]] = {}
    for one in found:
        row = (one.contender, one.of["operation"], one.of["bytes"])
        cells.setdefault(row, {})[one.of["count"]] = one
    return cells


def crossover(found: Sequence[Measurement], operation: str) -> int | None:
    """Return the least size from which on RMA (shm) is faster than messages (tcp).

    Both use one connection. Returns None if messages are faster at the largest size.
    """
    alone = {
        (one.contender, one.of["bytes"]): one.values["mean_us"]
        for one in found
        if one.of["operation"] == operation and one.of["count"] == 1
    }
    least = None
    for size in sorted({size for _, size in alone}, reverse=True):
        if alone[_RMA, size] >= alone[_MESSAGES, size]:
            break
        least = size
    return least


def _table(results: Mapping[str, Result]) -> Table:
    connected, threaded = _of(results, CONNECTIONS), _rates(_of(results, THREADS))
    counts = sorted({one.of["count"] for one in connected})
    rows = []
    for row, cells in _rates(connected).items():
        contender, operation, size = row
        alone, most = cells[counts[0]], cells[counts[-1]]
        rows.append(
            [contender, operation, format_bytes(size), _latencies(alone)]
            + [number(cells[count].values["gb_s"]) for count in counts]
            + [number(threaded[row][counts[-1]].values["gb_s"]), _latencies(most)]
        )
    for way in WAYS:
        for one in _of(results, AGGREGATION):
            if one.of["operation"] == way:
                label = f"{MESSAGES} writes, {way}"
                shown = [format_bytes(one.of["bytes"]), _latencies(one)]
                shown += [number(one.values["gb_s"]), *["-"] * (len(counts) + 1)]
                rows.append([one.contender, label, *shown])
    for operation in OPERATIONS:
        least = crossover(connected, operation)
        start = "never" if least is None else f"from {format_bytes(least)} on"
        rows.append([f"{_RMA} beats {_MESSAGES}", operation, start, *["-"] * (len(counts) + 3)])
    heading = ["transport", "operation", "size", "1 connection, µs: min, mean, p99, max"]
    heading += [f"connections: {count}, GB/s" for count in counts]
    heading += [f"threads on one connection: {counts[-1]}, GB/s"]
    heading += [f"each of {counts[-1]} connections, µs: min, mean, p99, max"]
    return Table(heading, rows)


def _answer(results: Mapping[str, Result]) -> list[str]:
    """Return our findings, with the numbers of the paper's."""
    connected, threaded = _of(results, CONNECTIONS), _of(results, THREADS)
    alone = {
        (one.contender, one.of["operation"], one.of["bytes"]): one
        for one in connected
        if one.of["count"] == 1
    }
    answers = [_of_aggregation(_of(results, AGGREGATION), alone)]
    for contender in (_MESSAGES, _RMA):
        ours = [one for one in connected if one.contender == contender]
        shared = [one for one in threaded if one.contender == contender]
        tails = [one.values["p99_us"] / one.values["min_us"] for one in ours]
        longest = max(one.values["max_us"] / one.values["min_us"] for one in ours)
        answers.append(
            f"{contender}: number of connections, and their throughput over one connection's,"
            f" medians over operations and sizes: {_more_connections(ours, alone)} (findings 3 and"
            f" 6; there are two cores). {_more_threads(shared, alone)} (2 and 5). The 99th"
            f" percentile of a latency is {number(min(tails))} to {number(max(tails))} times the"
            f" minimum. The longest is up to {number(longest)} times the minimum (7)."
        )
    return answers


_Alone = Mapping[tuple[str, str, int], Measurement]
"""The measurements of one connection with one thread, by contender, operation and bytes."""


def _times_alone(one: Measurement, alone: _Alone) -> float:
    single = alone[one.contender, one.of["operation"], one.of["bytes"]]
    return float(one.values["gb_s"] / single.values["gb_s"])


def _more_connections(found: Sequence[Measurement], alone: _Alone) -> str:
    times: dict[int, list[float]] = {}
    for one in found:
        times.setdefault(one.of["count"], []).append(_times_alone(one, alone))
    medians = {count: statistics.median(these) for count, these in sorted(times.items())}
    return ", ".join(f"{count}: {number(these)}" for count, these in medians.items() if count > 1)


def _more_threads(found: Sequence[Measurement], alone: _Alone) -> str:
    """Compare the most threads with one, small and large messages apart."""
    most = max(one.of["count"] for one in found)
    rates = []
    for heading, large in ((f"below {format_bytes(_LARGE)}", False), ("from there on", True)):
        times = [
            _times_alone(one, alone)
            for one in found
            if one.of["count"] == most and (one.of["bytes"] >= _LARGE) == large
        ]
        if times:
            rates.append(f"{number(min(times))} to {number(max(times))} {heading}")
    return f"{most} threads on one connection, over one thread's throughput: {', '.join(rates)}"


def _of_aggregation(found: Sequence[Measurement], alone: _Alone) -> str:
    """Return our answer to the paper's finding 1, on aggregation, for messages (tcp).

    It uses the minima, because means include waits for a core.
    """
    least = min(one.of["bytes"] for one in found)
    fastest = {
        one.of["operation"]: one.values["min_us"]
        for one in found
        if (one.contender, one.of["bytes"]) == (_MESSAGES, least)
    }
    single, together = (
        alone[_MESSAGES, "write", size].values["min_us"] for size in (least, _AGGREGATED)
    )
    times = [f"{number(fastest['alone'] / fastest[way])} ({way})" for way in WAYS if way != "alone"]
    return (
        f"{_MESSAGES}, minima: {MESSAGES} writes of {format_bytes(least)} together are"
        f" {', '.join(times)} times as fast as one after the other. A write of"
        f" {format_bytes(_AGGREGATED)} takes {number(together)} µs, a write of"
        f" {format_bytes(least)} {number(single)} µs (finding 1)."
    )


def _latencies(one: Measurement) -> str:
    return ", ".join(number(one.values[name]) for name in _LATENCIES)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    panels: dict[str, Panel] = {}
    connected = _of(results, CONNECTIONS)
    for kind, found in ((CONNECTIONS, connected), (THREADS, _of(results, THREADS))):
        for one in found:
            title = f"{one.of['operation']}, {one.contender}"
            panel = panels.setdefault(title, Panel(title, "bytes", "GB/s", logarithmic=True))
            style = "-" if kind == CONNECTIONS else ":"
            line = panel.lines.setdefault(f"{kind}: {one.of['count']}", ([], [], style))
            line[0].append(one.of["bytes"])
            line[1].append(one.values["gb_s"])
    return [*panels.values(), *_crossovers(connected), *_each_connection(connected)]


def _crossovers(found: Sequence[Measurement]) -> list[Panel]:
    """Return the panels of the latencies of messages and RMA, with the crossover."""
    panels = []
    for operation in OPERATIONS:
        panel = Panel(f"{operation}, one connection", "bytes", "mean, µs", logarithmic=True)
        for one in found:
            if one.of["operation"] == operation and one.of["count"] == 1:
                xs, ys, _ = panel.lines.setdefault(one.contender, ([], [], "-"))
                xs.append(one.of["bytes"])
                ys.append(one.values["mean_us"])
        least = crossover(found, operation)
        if least is not None:
            times = [one for _, ys, _ in panel.lines.values() for one in ys]
            marked = [least, least], [min(times), max(times)], "--"
            panel.lines[f"{_RMA} is faster from {format_bytes(least)} on"] = marked
        panels.append(panel)
    return panels


def _each_connection(found: Sequence[Measurement]) -> list[Panel]:
    """Return the panels of each connection's latencies, for the most connections."""
    most = max(one.of["count"] for one in found)
    panels = []
    for one in found:
        if (one.of["count"], one.of["bytes"]) == (most, _SHOWN):
            title = f"{one.of['operation']} of {format_bytes(_SHOWN)}, {one.contender}"
            panel = Panel(f"{title},\neach of {most} connections", "connection", "µs")
            panel.logarithmic_y = True
            panel.labels = [str(1 + place) for place in range(most)]
            for name, values in one.curves.items():
                panel.bars[name.removesuffix("_us")] = list(values)
            panels.append(panel)
    return panels


MESSAGES_OVER_CONNECTIONS = Experiment(
    name=_RUN,
    paper="Zhang, Jung 2017, An In-depth Performance Analysis of Many-Integrated Core",
    figures="Figs. 2 to 4, from 64 B on",
    label=Label.MEASURED,
    differs=(
        "A memory box and threads of one process replace SCIF between cores and Xeon Phis. Messages"
        " are reads and writes by tcp over loopback. RMA is shared memory of one machine, so its"
        " times do not answer finding 4. On two cores, more than two threads only alternate."
    ),
    found=(
        "Messages that are aggregated to 512 B improve throughput without a penalty in latency"
        " (finding 1).",
        "More threads on one connection do not help (findings 2 and 5). More connections do"
        " (finding 3). For RMA four connections are enough (finding 6); the paper's abstract says"
        " four to six.",
        "From 512 B on, one of the two, messages or RMA, becomes faster than the other. The paper's"
        " sentence names messages twice, so it does not say which (finding 4).",
        "Latencies have long tails (finding 7).",
    ),
    runs=(Run(_RUN, "papers.connections", [], ["--quick"]),),
    table=_table,
    panels=_panels,
    answer=_answer,
)
