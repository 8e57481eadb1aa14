"""A result as a figure: latency above, bandwidth below, one column for each collective.

REQUIRES: matplotlib, which the extra "bench" installs, and a result with some size in it.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_hbmcomm.bench.result import Result
from torch_hbmcomm.bench.table import machine_line


def save(result: Result, path: Path) -> None:
    collectives = list(dict.fromkeys(m.collective for m in result.measurements if m.bytes))
    figure = Figure(figsize=(3.2 * len(collectives) + 1, 6.4), layout="constrained")
    axes = figure.subplots(2, len(collectives), sharex=True, sharey="row", squeeze=False)
    for column, collective in enumerate(collectives):
        latency, bandwidth = axes[:, column]
        for contender in result.contenders:
            _draw(latency, bandwidth, result, collective, contender)
        latency.set_title(collective)
        bandwidth.set_xlabel("bytes")
    axes[0, 0].set_ylabel("median latency, µs")
    axes[1, 0].set_ylabel("size / latency, GB/s")
    axes[0, 0].legend()
    figure.suptitle(machine_line(result), fontsize="medium")
    figure.savefig(path, dpi=120)


def _draw(latency: Axes, bandwidth: Axes, result: Result, collective: str, contender: str) -> None:
    points = sorted(
        (found.bytes, found.median_us)
        for found in result.measurements
        if (found.collective, found.contender) == (collective, contender)
    )
    sizes = [size for size, _ in points]
    latency.loglog(sizes, [time for _, time in points], marker=".", label=contender)
    bandwidth.loglog(sizes, [size / time / 1e3 for size, time in points], marker=".")
    for axes in (latency, bandwidth):
        axes.grid(which="major", alpha=0.3)
