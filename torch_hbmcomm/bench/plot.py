"""A result as a figure: latency above, bandwidth below, one column for each collective and type.

REQUIRES: matplotlib, which the extra "bench" installs, and a result with some size in it.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_hbmcomm.bench.result import Result, machine_line


def save(result: Result, path: Path) -> None:
    columns = list(dict.fromkeys((m.collective, m.dtype) for m in result.measurements if m.bytes))
    figure = Figure(figsize=(3.2 * len(columns) + 2, 6.4), layout="constrained")
    axes = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    lines = {}
    for (collective, dtype), (latency, bandwidth) in zip(columns, axes.T, strict=True):
        for index, contender in enumerate(result.contenders):
            points = sorted(
                (found.bytes, found.median_us)
                for found in result.measurements
                if (found.collective, found.dtype, found.contender)
                == (collective, dtype, contender)
            )
            if points:
                dashes = "--" if contender in result.references else "-"
                style = {"color": f"C{index}", "marker": ".", "linestyle": dashes}
                sizes, times = zip(*points, strict=True)
                (lines[contender],) = latency.loglog(sizes, times, **style)
                bandwidth.loglog(sizes, [size / time / 1e3 for size, time in points], **style)
        latency.set_title(f"{collective}, {dtype}")
        bandwidth.set_xlabel("bytes")
        _grid(latency)
        _grid(bandwidth)
    axes[0, 0].set_ylabel("median latency, µs")
    axes[1, 0].set_ylabel("size / latency, GB/s")
    figure.legend(lines.values(), lines.keys(), loc="outside right center")
    title = machine_line(result.machine, result.ranks, result.rounds)
    figure.suptitle(title, fontsize="medium", wrap=True)
    figure.savefig(path, dpi=120)


def _grid(axes: Axes) -> None:
    axes.grid(which="major", alpha=0.3)
