"""Messages of all sizes over several connections and threads: Zhang and Jung 2017, Figs. 2 to 4."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

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
from papers.report.verdicts import (
    EQUAL,
    LONG_TAIL,
    ZHANG,
    Claim,
    Outcome,
    Spread,
    Unmeasured,
    graded,
)
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


_Alone = Mapping[tuple[str, str, int], Measurement]
"""The measurements of one connection with one thread, by contender, operation and bytes."""


def _times_alone(one: Measurement, alone: _Alone) -> float:
    single = alone[one.contender, one.of["operation"], one.of["bytes"]]
    return float(one.values["gb_s"] / single.values["gb_s"])


def _alone(results: Mapping[str, Result]) -> _Alone:
    return {
        (one.contender, one.of["operation"], one.of["bytes"]): one
        for one in _of(results, CONNECTIONS)
        if one.of["count"] == 1
    }


def _gains(results: Mapping[str, Result], contender: str) -> dict[int, float]:
    """Return the throughput of several connections over one connection's, as medians over
    operations and sizes, by the number of connections.

    Raises Unmeasured without several connections.
    """
    alone = _alone(results)
    times: dict[int, list[float]] = {}
    for one in _of(results, CONNECTIONS):
        if one.contender == contender and one.of["count"] > 1:
            times.setdefault(one.of["count"], []).append(_times_alone(one, alone))
    if not times:
        raise Unmeasured(f"The record has no several connections of {contender}.")
    return {count: statistics.median(these) for count, these in sorted(times.items())}


def _listed(gains: Mapping[int, float]) -> str:
    counts = ", ".join(map(str, gains))
    listed = ", ".join(f"{gain:.2f}" for gain in gains.values())
    return f"With {counts} connections the throughput is {listed} times one connection's"


def _aggregation(results: Mapping[str, Result]) -> Outcome:
    """Answer finding 1 by minima, because means include waits for a core."""
    found = [one for one in _of(results, AGGREGATION) if one.contender == _MESSAGES]
    if not found:
        raise Unmeasured(f"The record has no aggregation of {_MESSAGES}.")
    least = min(one.of["bytes"] for one in found)
    fastest = {
        one.of["operation"]: one.values["min_us"] for one in found if one.of["bytes"] == least
    }
    alone = _alone(results)
    single, together = (
        alone[_MESSAGES, "write", size].values["min_us"] for size in (least, _AGGREGATED)
    )
    gains = {way: fastest["alone"] / fastest[way] for way in WAYS if way != "alone"}
    shown = " or ".join(f"{number(gain)} times ({way})" for way, gain in gains.items())
    cheap = together <= EQUAL * single
    return Outcome(
        f"{MESSAGES} writes of {format_bytes(least)} together are {shown} as fast as one after the"
        f" other. A write of {format_bytes(_AGGREGATED)} takes {together / single:.2f} times the"
        f" time of a write of {format_bytes(least)}.",
        graded(min(gains.values()) > EQUAL and cheap, max(gains.values()) > EQUAL),
        f"A batch issues the {MESSAGES} writes together, and packing makes one write of"
        f" {format_bytes(MESSAGES * least)} of them; the paper aggregates to"
        f" {format_bytes(_AGGREGATED)}. The figures are minima over TCP on loopback, as means"
        " include waits for one of two cores.",
    )


def _gaining(of_most: Sequence[Measurement], alone: _Alone) -> str:
    """Return the sizes with which the most threads gain more than 10 %, in a sentence."""
    sizes = {one.of["bytes"] for one in of_most if _times_alone(one, alone) > EQUAL}
    listed = ", ".join(map(format_bytes, sorted(sizes)))
    return f"Sizes that gain more than 10 %: {listed or 'none'}."


def _threads(contender: str, reason: str) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that compares the most threads on one connection with one thread."""

    def outcome(results: Mapping[str, Result]) -> Outcome:
        alone = _alone(results)
        found = [one for one in _of(results, THREADS) if one.contender == contender]
        most = max((one.of["count"] for one in found), default=0)
        of_most = [one for one in found if one.of["count"] == most]
        small, large = (
            Spread.of(
                [_times_alone(one, alone) for one in of_most
                 if (one.of["bytes"] >= _LARGE) == is_large],
                f"threads of {contender}",
            )
            for is_large in (False, True)
        )  # fmt: skip
        return Outcome(
            f"{most} threads reach {small.span} times one thread's throughput below"
            f" {format_bytes(_LARGE)}, and {large.span} times from there on.",
            graded(max(small.most, large.most) <= EQUAL, min(small.median, large.median) <= EQUAL),
            f"{reason} {_gaining(of_most, alone)}",
        )

    return outcome


def _connections(results: Mapping[str, Result]) -> Outcome:
    gains = _gains(results, _MESSAGES)
    return Outcome(
        f"{_listed(gains)}.",
        graded(min(gains.values()) > EQUAL, max(gains.values()) > EQUAL),
        "The figures are medians over reads and writes of all sizes, over TCP on two cores.",
    )


def _enough(contender: str, count: int) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that asks whether more connections than `count` gain no more."""

    def outcome(results: Mapping[str, Result]) -> Outcome:
        gains = _gains(results, contender)
        if count not in gains:
            raise Unmeasured(f"The record has no {count} connections of {contender}.")
        more = max((gain for many, gain in gains.items() if many > count), default=0.0)
        first = min(many for many, gain in gains.items() if gain * EQUAL >= max(gains.values()))
        return Outcome(
            f"{_listed(gains)}; from {first} on it is within 10 % of the best.",
            graded(first == count, more <= EQUAL * gains[count]),
            "Two cores serve all connections, so more of them cannot gain much.",
        )

    return outcome


def _tails(contender: str, limit: str) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that judges the latencies of the most connections.

    limit: a sentence on the difference from the paper.
    """

    def outcome(results: Mapping[str, Result]) -> Outcome:
        found = [one for one in _of(results, CONNECTIONS) if one.contender == contender]
        most = max((one.of["count"] for one in found), default=0)
        many = [one.values for one in found if one.of["count"] == most]
        late = Spread.of([one["p99_us"] / one["min_us"] for one in many], f"tails of {contender}")
        uneven = Spread.of([one["uneven"] for one in many], f"uneven {contender}")
        return Outcome(
            f"With {most} connections the 99th percentile is {late.times('the minimum')}. The"
            f" slowest connection's mean is {uneven.times('the mean of the fastest')}.",
            graded(late.median >= LONG_TAIL and uneven.median > EQUAL, late.most >= LONG_TAIL),
            f"{limit} The threads of all connections share two cores, so a part of the tail is"
            " waiting for a core.",
        )

    return outcome


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


_THREADS_RULE = (
    "It holds if the most threads gain at most 10 % in all cells, and in part if in the median of"
    " small or of large messages."
)
_ENOUGH_RULE = (
    "It holds if four is the least number of connections within 10 % of the best throughput. It"
    " holds in part if more than four gain at most 10 % over four."
)
_TAILS_RULE = (
    "It holds if in the median the 99th percentile is at least twice the minimum, and the"
    " connections differ by more than 10 %. It holds in part if the percentile is so high in some"
    " cell."
)
_CLAIMS = (
    Claim(
        ZHANG,
        "Fig. 2, finding 1; abstract",
        "Messages that are aggregated to 512 B improve throughput without a penalty in latency.",
        _aggregation,
        "It holds if each way of aggregating gains more than 10 %, and a write of 512 B takes at"
        " most 10 % longer than one of 64 B. It holds in part if one way gains.",
    ),
    Claim(
        ZHANG,
        "Fig. 2, finding 2",
        "More threads on one connection do not improve the throughput of messages.",
        _threads(_MESSAGES, "Messages are reads and writes of a box by TCP on loopback."),
        _THREADS_RULE,
    ),
    Claim(
        ZHANG,
        "Fig. 2, finding 3",
        "Several connections, if established properly, improve the throughput of messages"
        " significantly.",
        _connections,
        "It holds if each number of connections gains more than 10 % in the median, and in part if"
        " some number does.",
    ),
    Claim(
        ZHANG,
        "Abstract, connections",
        "Throughput is highest with only 4 to 6 connections.",
        _enough(_MESSAGES, 4),
        _ENOUGH_RULE,
    ),
    Claim(
        ZHANG,
        "Fig. 3, finding 5",
        "More threads on one connection do not improve the throughput of RMA.",
        _threads(
            _RMA, "Shared memory replaces RMA: each thread copies by itself, and no adapter does."
        ),
        _THREADS_RULE,
    ),
    Claim(
        ZHANG,
        "Fig. 3, finding 6",
        "More connections improve RMA, and four suffice for the best performance.",
        _enough(_RMA, 4),
        _ENOUGH_RULE,
    ),
    Claim(
        ZHANG,
        "Fig. 4, finding 7; abstract",
        "The latencies of RMA can have long tails, which degrade the performance of many"
        " connections. The load of the connections is severely unbalanced.",
        _tails(
            _RMA,
            "Shared memory replaces RMA, and a loss by tails is not judged. Fig. 4 has the longest"
            " times; ours are in the section's table.",
        ),
        _TAILS_RULE,
    ),
    Claim(
        ZHANG,
        "Finding 7 for messages; abstract",
        "Communication can have long tails of latency, and the load of the connections is severely"
        " unbalanced.",
        _tails(_MESSAGES, "The paper's Fig. 4 is of RMA, and these are messages."),
        _TAILS_RULE,
    ),
)


MESSAGES_OVER_CONNECTIONS = Experiment(
    name=_RUN,
    figures="Figs. 2 to 4, from 64 B on",
    label=Label.MEASURED,
    differs=(
        "A memory box and threads of one process replace SCIF between cores and Xeon Phis. Messages"
        " are reads and writes by tcp over loopback. RMA is shared memory of one machine, so its"
        " times do not answer finding 4. On two cores, more than two threads only alternate. 64"
        " writes are issued one after the other (alone), issued together (batch), or copied into"
        " one buffer that one write sends (packed)."
    ),
    claims=_CLAIMS,
    runs=(Run(_RUN, "papers.connections", [], ["--quick"]),),
    table=_table,
    panels=_panels,
)
