"""Plots the latency and the bandwidth of each collective and type, side by side."""

from benchmarks.panels import Panel
from torch_hbmcomm.bench.result import Result


def panels(result: Result) -> tuple[list[Panel], int]:
    """Return the panels and the number of columns: two collectives in a row."""
    sized = [one for one in result.measurements if one.of["bytes"]]
    kinds = list(dict.fromkeys((one.of["collective"], one.of["dtype"]) for one in sized))
    found = []
    for collective, dtype in kinds:
        latency = Panel(f"{collective}, {dtype}", y="median latency, µs", logarithmic=True)
        bandwidth = Panel("", "bytes", "size / latency, GB/s", logarithmic=True)
        for name in result.contenders:
            points = sorted(
                (one.of["bytes"], one.median)
                for one in sized
                if (one.of["collective"], one.of["dtype"], one.contender)
                == (collective, dtype, name)
            )
            if points:
                style = "--" if name in result.references else "-"
                sizes = [size for size, _ in points]
                latency.lines[name] = (sizes, [time for _, time in points], style)
                bandwidth.lines[name] = (sizes, [size / time / 1e3 for size, time in points], style)
        found += [latency, bandwidth]
    return found, 2 * min(2, len(kinds))
