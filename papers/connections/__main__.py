"""Latency and bandwidth of a memory box, over the sizes of messages and the numbers of connections.

    python -m papers.connections --help

It also varies the number of threads on one connection. The box and a native program with the
threads (benchmarks/native/box_threads.cpp) are on this machine. Every thread has its own segment.
In a window of time, all threads repeat one operation, and each waits for its result. The windows of
different numbers of connections and threads alternate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.programs import program
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.box import BoxPlan, BoxProcess, box
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.report import Json, check_file, fail, finish
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    Unavailable,
    check_counts,
    check_names,
    describe_machine,
)
from torch_hbmcomm.sizes import KIB, MIB, format_bytes, parse_bytes

TRANSPORTS = ("tcp", "shm")
OPERATIONS = ("read", "write")
CONNECTIONS = "connections"  # each with a client and a thread
THREADS = "threads"  # on one connection
AGGREGATION = "aggregation"
WAYS = ("alone", "batch", "packed")
MESSAGES = 64  # messages written in `aggregation`
_MOST_PACKED = 4 * KIB  # bytes of the longest message in `aggregation`
_NUMBERS = 6  # per thread, in the program's answer

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Plan:
    """A choice of measurements. Raises ValueError if a measurement is impossible.

    counts: numbers of connections, and of threads on one connection.
    sizes: bytes of an operation.
    rounds: windows of each count; counts alternate.
    window: length of a window in milliseconds.
    """

    counts: Sequence[int] = (1, 2, 4, 6, 8)
    sizes: Sequence[int] = tuple(sorted({512, *(64 * 4**power for power in range(9))}))
    transports: Sequence[str] = TRANSPORTS
    rounds: int = 3
    window: int = 50

    def __post_init__(self) -> None:
        check_names("transport", self.transports, TRANSPORTS)
        check_counts(self, {"rounds": 1, "window": 1})
        if not self.counts or min(self.counts) < 1:
            raise ValueError("there is at least one connection, and one thread")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError("an operation has at least one byte")


@dataclass(frozen=True)
class Thread:
    """The figures of one thread in a window.

    operations: number completed; in `aggregation` an operation writes all MESSAGES.
    seconds: time since the common start of the threads.
    minimum, mean, p99, maximum: microseconds of an operation.
    """

    operations: float
    seconds: float
    minimum: float
    mean: float
    p99: float
    maximum: float


def threads_of(numbers: Sequence[float]) -> list[Thread]:
    """Return the threads' figures from the program's answer."""
    starts = range(0, len(numbers), _NUMBERS)
    return [Thread(*numbers[start : start + _NUMBERS]) for start in starts]


def summary(windows: Sequence[Sequence[Thread]], size: int) -> dict[str, float]:
    """Return the values of a row.

    - GB/s of all threads together, median of the windows
    - microseconds of an operation, over all threads and windows; the 99th percentile is the median
      of the threads' percentiles
    - the slowest thread's mean divided by the fastest thread's mean, median of the windows
    """
    everyone = [thread for window in windows for thread in window]
    operations = sum(thread.operations for thread in everyone)
    return {
        "gb_s": statistics.median(
            sum(thread.operations * size / thread.seconds for thread in window) / 1e9
            for window in windows
        ),
        "min_us": min(thread.minimum for thread in everyone),
        "mean_us": sum(thread.mean * thread.operations for thread in everyone) / operations,
        "p99_us": statistics.median(thread.p99 for thread in everyone),
        "max_us": max(thread.maximum for thread in everyone),
        "uneven": statistics.median(
            max(thread.mean for thread in window) / min(thread.mean for thread in window)
            for window in windows
        ),
    }


def each_thread(windows: Sequence[Sequence[Thread]]) -> dict[str, list[float]]:
    """Return, for each thread, the microseconds of an operation, as medians over the windows."""
    return {
        f"{name}_us": [
            statistics.median(getattr(thread, name) for thread in own)
            for own in zip(*windows, strict=True)
        ]
        for name in ("minimum", "mean", "p99", "maximum")
    }


@dataclass(frozen=True)
class ThreadSet:
    """Threads on connections to the box.

    kind: CONNECTIONS: `count` connections with a thread each. THREADS: `count` threads on one
    connection.
    """

    kind: str
    count: int

    def connect(self, running: Any, ours: BoxProcess, transport: str, size: int) -> None:
        each = (self.count, 1) if self.kind == CONNECTIONS else (1, self.count)
        running.ask("connect", ours.url, ours.token, transport, *each, size)


def _thread_sets(counts: Sequence[int]) -> list[ThreadSet]:
    """Return the sets of connections, then the sets of threads on one connection.

    The sets of connections include one thread on one connection, so the sets of threads omit it.
    """
    threads = [ThreadSet(THREADS, count) for count in counts if count > 1]
    return [*(ThreadSet(CONNECTIONS, count) for count in counts), *threads]


def _measured(plan: Plan, ours: BoxProcess) -> Iterator[Measurement]:
    for transport in plan.transports:
        for size in plan.sizes:
            report.say(f"{transport}, {format_bytes(size)}")
            yield from _of_size(plan, ours, transport, size)
        for size in plan.sizes:
            if size <= _MOST_PACKED:
                yield from _aggregation(plan, ours, transport, size)


def _of_size(plan: Plan, ours: BoxProcess, transport: str, size: int) -> Iterator[Measurement]:
    windows: dict[tuple[str, ThreadSet], list[list[Thread]]] = {}
    with program("box_threads") as running:
        for _ in range(plan.rounds):
            for threads in _thread_sets(plan.counts):
                threads.connect(running, ours, transport, size)
                for operation in OPERATIONS:
                    found = threads_of(running.ask("run", operation, plan.window))
                    windows.setdefault((operation, threads), []).append(found)
    for (operation, threads), own in windows.items():
        of = {
            "section": threads.kind,
            "operation": operation,
            "bytes": size,
            "count": threads.count,
        }
        values = summary(own, size)
        yield Measurement(of, f"hbm {transport}", values=values, curves=each_thread(own))


def _aggregation(plan: Plan, ours: BoxProcess, transport: str, size: int) -> Iterator[Measurement]:
    windows: dict[str, list[list[Thread]]] = {way: [] for way in WAYS}
    with program("box_threads") as running:
        ThreadSet(CONNECTIONS, 1).connect(running, ours, transport, MESSAGES * size)
        for _ in range(plan.rounds):
            for way in WAYS:
                found = threads_of(running.ask("run", f"{way}:{size}", plan.window))
                windows[way].append(found)
    for way, own in windows.items():
        of = {"section": AGGREGATION, "operation": way, "bytes": size, "count": 1}
        yield Measurement(of, f"hbm {transport}", values=summary(own, MESSAGES * size))


def measure(plan: Plan) -> Result:
    """Measure. Raises Unavailable if the native programs are missing, PeerFailed if one fails."""
    memory = 2 * max(plan.counts) * max(*plan.sizes, MESSAGES * _MOST_PACKED) + 64 * MIB
    with box(BoxPlan([]), memory=memory) as ours:
        found = list(_measured(plan, ours))
    return Result(
        benchmark="connections",
        machine=describe_machine(),
        plan=asdict(plan),
        contenders={f"hbm {transport}": "" for transport in plan.transports},
        notes=[
            f"aggregation: {MESSAGES} messages, each an operation (alone), issued together "
            "(batch), or copied into one buffer that is written in one operation (packed)"
        ],
        measurements=found,
    )


def _tables(result: Result) -> Iterator[Table]:
    for section in (CONNECTIONS, THREADS, AGGREGATION):
        headings = ("", "operation", "size", "count", "GB/s", "min", "mean", "p99", "max, µs")
        table = report.table_of(section, headings)
        for one in result.measurements:
            if one.of["section"] == section:
                table.add_row(one.contender, *_cells(one.of, one.values))
        yield table


def _cells(of: Mapping[str, Any], values: Mapping[str, float]) -> list[str]:
    names = ("gb_s", "min_us", "mean_us", "p99_us", "max_us")
    told = [of["operation"], format_bytes(of["bytes"]), str(of["count"])]
    return told + [f"{values[name]:.3g}" for name in names]


@app.command()
def connections(
    counts: Annotated[
        str | None,
        typer.Option(help="Of connections and of threads.", show_default="1,2,4,6,8"),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="As in 4KiB,1MiB.", show_default="512 and 64 B to 4 MiB by fours"),
    ] = None,
    transports: Annotated[
        str | None, typer.Option(help="Of tcp and shm.", show_default="tcp,shm")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, show_default="3")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Milliseconds.", show_default="50")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few sizes and counts, as a check.")
    ] = False,
    json: Json = None,
) -> None:
    """Time reads and writes of a memory box by many threads, and writes of many messages.

    The exit status never depends on a time. Everything takes two minutes.
    """
    check_file(json)
    few: dict[str, Any] = {"counts": (1, 2), "sizes": (64, 512, 4 * KIB), "rounds": 1}
    few["window"] = 5
    try:
        chosen = report.given(
            counts=None if counts is None else [int(one) for one in report.names(counts)],
            sizes=None if sizes is None else [parse_bytes(one) for one in report.names(sizes)],
            transports=None if transports is None else report.names(transports),
            rounds=rounds,
            window=window,
        )
        plan = Plan(**((few if quick else {}) | chosen))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = measure(plan)
    except (Unavailable, PeerFailed) as error:
        fail(str(error))
    finish(report.group(list(_tables(result)), result), result, json)


if __name__ == "__main__":
    app()
