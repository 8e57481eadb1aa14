"""Measures the time until live ranks detect the death of a rank, over hbm, Gloo and MPI.

    python -m benchmarks.failures --json failures.json

The contenders alternate. A sample comes from one job: the benchmark kills the last rank, the victim
(SIGKILL), and measures the time until the slowest live rank has its error. The situations are:

    allreduce  all ranks repeat a small allreduce
    init       init_process_group, when all ranks except rank 1 have introduced themselves; rank 1
               never calls it
    new_group  the live ranks wait for the victim in new_group

A layout names each rank's node, by HBMCOMM_NODE_ID: "aabb" is two nodes of two ranks, on this
machine. Gloo ignores the layout. If a live rank does not detect the death, the time is about the
timeout.

MPI is MPICH in native programs, built by `make bench`. They meet without a launcher, because a
launcher would end all ranks after the kill. MPI is measured in `allreduce` only.
"""

import multiprocessing
import os
import signal
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import RenderableType
from rich.text import Text

from benchmarks.programs import program, why_unavailable
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    check_counts,
    check_names,
    describe_machine,
    sampled,
)

_START_SECONDS = 60.0
_BEFORE_SECONDS = 0.3  # from the start of the situation to the kill

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

MPI = "mpich"
CONTENDERS = {"hbm": "hbm", "gloo": "PyTorch's own backend", MPI: "MPI itself, without a launcher"}
SITUATIONS = ("allreduce", "init", "new_group")
_LATE = 1  # the rank that never calls init_process_group() in `init`
# A rank's introduction is in the store under the key that consists of this prefix and the rank.
_INTRODUCTION = {"hbm": "rendezvous1/rendezvous/", "gloo": "cpu//0/"}


@dataclass(frozen=True)
class FailurePlan:
    """A choice of measurements.

    Raises ValueError for an unknown situation, a layout of too few ranks, or a number below its
    minimum.

    timeout: for operations, in seconds.
    """

    layouts: Sequence[str]
    situations: Sequence[str]
    timeout: float
    rounds: int

    def __post_init__(self) -> None:
        check_names("situation", self.situations, SITUATIONS)
        check_counts(self, {"timeout": 1, "rounds": 1})
        if short := [layout for layout in self.layouts if len(layout) < 2]:
            raise ValueError(f"layout {short[0]!r} has fewer than two ranks")
        if "init" in self.situations and min(map(len, self.layouts), default=3) < 3:
            raise ValueError("init needs layouts of three ranks or more: one rank never comes")


def _rank(
    pipe: Connection, rank: int, backend: str, layout: str, situation: str, timeout: float, url: str
) -> None:
    """Run one rank. Sends "ready" over the pipe, then the time and the text of its error."""
    os.environ["HBMCOMM_NODE_ID"] = layout[rank]
    torch.set_num_threads(1)
    size = len(layout)
    start, limit = timedelta(seconds=_START_SECONDS), timedelta(seconds=timeout)

    def init(timeout: timedelta) -> dist.ProcessGroup:
        dist.init_process_group(
            backend, init_method=url, rank=rank, world_size=size, timeout=timeout
        )
        dist.all_reduce(torch.ones(1))
        group: dist.ProcessGroup = dist.new_group(timeout=limit)
        return group

    if situation != "init":
        group = init(start)
        dist.all_reduce(torch.ones(1), group=group)
    pipe.send("ready")
    if (situation, rank) in (("init", _LATE), ("new_group", size - 1)):
        signal.pause()
    try:
        if situation == "init":
            group = init(limit)
        if situation == "new_group":
            dist.new_group(list(range(size)), timeout=limit)
        while True:
            dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        text = str(error)
    pipe.send((time.monotonic(), text))


def _await_introduction(store: Path, rank: int, backend: str) -> None:
    """Wait until the rank has introduced itself in the store."""
    key = f"{_INTRODUCTION[backend]}{rank}".encode()
    end = time.monotonic() + _START_SECONDS
    while not (store.exists() and key in store.read_bytes()):
        if time.monotonic() > end:
            raise RuntimeError(f"rank {rank} did not come within {_START_SECONDS:.0f} s")
        time.sleep(0.01)


def _seconds(backend: str, layout: str, situation: str, timeout: float) -> tuple[float, bool]:
    """Return the seconds until the slowest live rank has its error, and True if all errors name
    the victim."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "torch.distributed"])
    victim = len(layout) - 1
    with tempfile.TemporaryDirectory(prefix="hbmcomm-bench-") as folder:
        store = Path(folder) / "store"
        ranks, pipes = [], []
        try:
            for rank in range(len(layout)):
                ours, theirs = processes.Pipe()
                arguments = (theirs, rank, backend, layout, situation, timeout, f"file://{store}")
                process = processes.Process(target=_rank, args=arguments)
                process.start()
                theirs.close()
                ranks.append(process)
                pipes.append(ours)
            for rank, pipe in enumerate(pipes):
                _hear(pipe, rank, _START_SECONDS)
            if situation == "init":
                _await_introduction(store, victim, backend)
            time.sleep(_BEFORE_SECONDS)
            killed = time.monotonic()
            ranks[victim].kill()
            said = [
                _hear(pipe, rank, 2 * timeout + _START_SECONDS)
                for rank, pipe in enumerate(pipes[:victim])
                if (situation, rank) != ("init", _LATE)
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()
    named = all(f"rank {victim} (" in text for _, text in said)
    return max(at for at, _ in said) - killed, named


def _seconds_of_mpi(layout: str, timeout: float) -> tuple[float, bool]:
    """Return the same as _seconds(), for programs that call MPI_Allreduce."""
    size = len(layout)
    victim = size - 1
    libraries = Path(sysconfig.get_path("data")) / "lib"
    with tempfile.TemporaryDirectory(prefix="hbmcomm-bench-") as folder, ExitStack() as stack:
        ranks = []
        for rank, node in enumerate(layout):
            launcher = ["env", f"HBMCOMM_NODE_ID={node}"]
            started = program("mpi_collectives", folder, rank, size, libraries, launcher=launcher)
            ranks.append(stack.enter_context(started))
        for each in ranks:
            stack.callback(each.kill)
        for words in (("ready",), ("prepare", "allreduce", 4, "float32")):
            for each in ranks:
                each.tell(*words)
            for each in ranks:
                each.answer()
        for each in ranks:
            each.tell("run", 1, 1 << 60)
        time.sleep(_BEFORE_SECONDS)
        killed = time.monotonic()
        ranks[victim].kill()
        named = True
        for each in ranks[:victim]:
            if not each.says(killed + timeout - time.monotonic()):
                return timeout, False
            try:
                each.answer()
            except PeerFailed as error:
                named &= f"rank {victim}" in str(error)
        return time.monotonic() - killed, named


def _hear(pipe: Connection, rank: int, limit: float) -> tuple[float, str]:
    if not pipe.poll(limit):
        raise RuntimeError(f"rank {rank} sent nothing for {limit:.0f} s")
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without a result") from None


def run(plan: FailurePlan) -> Result:
    """Run all jobs. Raises RuntimeError if a live rank ends or hangs without an error."""
    found = []
    cause = why_unavailable()
    for situation, layout in product(plan.situations, plan.layouts):
        has_mpi = cause is None and situation == "allreduce"
        samples: dict[str, list[tuple[float, bool]]] = {
            name: [] for name in CONTENDERS if name != MPI or has_mpi
        }
        for _ in range(plan.rounds):
            for name, taken in samples.items():
                if name == MPI:
                    taken.append(_seconds_of_mpi(layout, plan.timeout))
                else:
                    taken.append(_seconds(name, layout, situation, plan.timeout))
        of = {"situation": situation, "layout": layout}
        for name, taken in samples.items():
            times = [seconds * 1e6 for seconds, _ in taken]
            named = sum(each for _, each in taken)
            found.append(sampled(of, name, times, values={"named": named}))
    return Result(
        benchmark="failures",
        machine=describe_machine(),
        plan={"rounds": plan.rounds, "timeout": plan.timeout},
        contenders=CONTENDERS,
        unavailable={MPI: cause} if cause else {},
        measurements=found,
    )


def render(result: Result) -> RenderableType:
    """Return a table: times, and the number of jobs in which all errors name the victim."""

    def entry(row: report.Row, one: Measurement) -> Text:
        text = report.compared_with(one, row["hbm"], reference=True)
        return text.append(f"\nnamed {one.values['named']} of {one.summary.n}")

    headings = {
        "killed in": lambda one: str(one.of["situation"]),
        "layout": lambda one: str(one.of["layout"]),
    }
    title = "From a rank's end to the last error"
    return report.group([report.compared(title, result.measurements, headings, entry)], result)


@app.command()
def main(
    layouts: Annotated[str, typer.Option(help="Each rank's node, as in aaaa,aabb.")] = "aaaa,aabb",
    situations: Annotated[str, typer.Option(help="At which it is killed.")] = ",".join(SITUATIONS),
    timeout: Annotated[float, typer.Option(help="For operations, in seconds.")] = 10,
    rounds: Annotated[int, typer.Option(help="Jobs of each contender.")] = 7,
    json: Json = None,
) -> None:
    """Measure the time until a death is detected, over hbm, Gloo and MPI.

    The exit status never depends on a time.
    """
    check_file(json)
    try:
        plan = FailurePlan(
            layouts=names(layouts), situations=names(situations), timeout=timeout, rounds=rounds
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = run(plan)
    except RuntimeError as error:
        fail(str(error))
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
