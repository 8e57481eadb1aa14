"""Writes the totals of this process' operations for Prometheus (docs/profile.md, Metrics)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch.distributed as dist
from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from torch_hbmcomm.native import load
from torch_hbmcomm.profiling.costs import size_class
from torch_hbmcomm.profiling.process_end import at_process_end

PERIOD = 15.0
"""The seconds from one file to the next."""

PATIENCE = 10.0
"""The seconds that the end of a process waits for a folder that does not answer."""

_LABELS = ("kind", "size", "path", "data")
_WAITING_LABELS = ("kind", "size", "path", "last_rank")
_NO_LIMIT = 1 << 63  # bytes, in the place of a limit of 0

# For each counter: its name in a total, the factor to its unit, and its description.
_COUNTERS = {
    "calls": ("calls", 1.0, "Operations that have ended."),
    "bytes": ("bytes", 1.0, "Bytes of their inputs, or of their outputs if there are more."),
    "transit_seconds": ("transit", 1e-9, "Time from their issues to their ends."),
    "hidden_seconds": ("hidden", 1e-9, "Processor time of the issuing threads meanwhile."),
}


def start(folder: Path) -> None:
    """Count operations until this process ends. Write a file into `folder` every PERIOD, and at the
    end. If a file cannot be written, warn once and try again after the PERIOD."""
    load().profile_start_totals()
    writer = _Writer(folder)
    ended = Event()

    def write_again_and_again() -> None:
        while not ended.wait(PERIOD):
            writer.write()

    thread = Thread(target=write_again_and_again, name="hbmcomm-metrics", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        load().warn(f"HBMCOMM_METRICS={folder}: the metrics are written only at the end: {error}")

    def finish() -> None:
        ended.set()
        if thread.ident is not None:
            thread.join(PATIENCE)
        if not thread.is_alive():
            writer.write()

    at_process_end(finish)


class _Writer:
    """Writes ``hbmcomm-rank-N.prom``. N is this process' rank in the job: in the default group, or
    in the first group if there is no default group.

    Threads: one at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank = -1
        self._file: Path | None = None
        self._written = (0, 0)  # inode and time of the file as this process has written it
        self._warned = False

    def write(self) -> None:
        """Replace the file. Before this process is a rank, do nothing. Once it has another rank,
        remove the former file, unless another rank has replaced that file."""
        found = load().profile_totals()
        if found["rank"] < 0:
            return
        # One call, because another thread may destroy the default group at any time.
        with suppress(ValueError):  # there is no default group
            self._rank = dist.get_rank()
        if self._rank < 0:
            self._rank = found["rank"]
        registry = CollectorRegistry()
        registry.register(_Operations(self._rank, found))
        file = self._folder / f"hbmcomm-rank-{self._rank}.prom"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(file), registry)  # writes another file, and renames it
            former, written = self._file, self._written
            self._file, self._written = file, _identity(file)
            if former is not None and former != file:
                with suppress(FileNotFoundError):  # another rank has moved and removed its file
                    if _identity(former) == written:
                        former.unlink()
        except OSError as error:
            if not self._warned:
                load().warn(
                    f"HBMCOMM_METRICS={self._folder}: the metrics cannot be written: {error}"
                )
            self._warned = True


def _identity(file: Path) -> tuple[int, int]:
    """Return the inode and the time of a file. A file system uses an inode again."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


class _Operations(Collector):
    def __init__(self, rank: int, found: dict[str, Any]) -> None:
        self._rank = str(rank)
        self._found = found

    def describe(self) -> list[Metric]:
        return []  # without describe() the registry would call collect() to learn names

    def collect(self) -> Iterator[Metric]:
        for name, (field, factor, text) in _COUNTERS.items():
            yield self._family(name, text, _LABELS, field, factor)
        yield self._family(
            "waiting_seconds",
            "Time from the begins on this rank until the last rank of the node had begun.",
            _WAITING_LABELS,
            "waiting",
            1e-9,
        )
        uncounted = CounterMetricFamily(
            "hbmcomm_operation_uncounted",
            "Operations that failed or are in no other counter.",
            labels=["rank"],
        )
        uncounted.add_metric([self._rank], self._found["uncounted"])
        yield uncounted

    def _family(
        self, name: str, text: str, labels: tuple[str, ...], field: str, factor: float
    ) -> Metric:
        sums: dict[tuple[str, ...], int] = defaultdict(int)
        for total in self._found["totals"]:
            if labels is _WAITING_LABELS and total["last_rank"] < 0:
                continue
            described = {**total, "size": size_class(total["limit"] or _NO_LIMIT)}
            sums[tuple(str(described[label]) for label in labels)] += total[field]
        family = CounterMetricFamily(f"hbmcomm_operation_{name}", text, labels=["rank", *labels])
        for values, value in sums.items():
            family.add_metric([self._rank, *values], value * factor)
        return family
