"""Measures the time from the death of a rank to the next group, over hbm and Gloo.

    python -m benchmarks.heal --json heal.json

Each job gives a sample: the benchmark kills the last rank (SIGKILL) while all ranks repeat a small
all_reduce. When all survivors have their errors, they and a waiting newcomer form the next group of
the same size. The benchmark passes the handles on, through pipes. It measures:

    end         from the kill to the end of the killed process, by its pidfd. Before the end the
                kernel frees its memory, and closes its sockets
    errors      from the kill to the last survivor's error
    next group  from that error to the last rank's first right all_reduce of the next group

The contenders alternate:

    again     torch_hbmcomm.reconfigure
    in place  torch.distributed._reconfigure over hbm (PyTorch 2.14 and later)
    gloo      the same over Gloo, whose members need a store that lives. Only the ranks that
              exchange data with the dead one learn of its death. The others wait for the group's
              timeout, which is 5 s here.

A layout names each rank's node, by HBMCOMM_NODE_ID: "aabb" is two nodes of two ranks, on this
machine. Gloo ignores the layout. The newcomer is on the victim's node.
"""

import multiprocessing
import os
import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import RenderableType
from torch._C._distributed_c10d import TCPStore

import torch_hbmcomm
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names
from torch_hbmcomm.bench.result import (
    Result,
    check_counts,
    check_names,
    describe_machine,
    sampled,
)

_LIMIT = 60.0  # seconds, for every step of a job
_TIMEOUT = timedelta(seconds=60)  # of the groups
_GLOO_TIMEOUT = timedelta(seconds=5)
PARTS = ("end", "errors", "next group")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

IN_PLACE = hasattr(dist, "_reconfigure")
CONTENDERS = {"again": "torch_hbmcomm.reconfigure"} | (
    {"in place": "dist._reconfigure over hbm", "gloo": "dist._reconfigure over Gloo"}
    if IN_PLACE
    else {}
)


@dataclass(frozen=True)
class HealPlan:
    """A choice of measurements.

    Raises ValueError for an unknown contender, a layout of fewer than two ranks, or no round.
    """

    layouts: Sequence[str]
    contenders: Sequence[str]
    rounds: int

    def __post_init__(self) -> None:
        check_names("contender", self.contenders, CONTENDERS)
        check_counts(self, {"rounds": 1})
        if short := [layout for layout in self.layouts if len(layout) < 2]:
            raise ValueError(f"layout {short[0]!r} has fewer than two ranks")


def _member(pipe: Connection, number: int, contender: str, node: str, port: int) -> None:
    """Form the groups that the benchmark asks for. It answers each with the time of the
    first all_reduce, and later with "failed"."""
    os.environ["HBMCOMM_NODE_ID"] = node
    torch.set_num_threads(1)
    limit = _GLOO_TIMEOUT if contender == "gloo" else _TIMEOUT
    if contender != "again":
        options: dict[str, Any] = {"enable_reconfigure": True}
        dist.init_process_group(
            "gloo" if contender == "gloo" else "hbm",
            store=TCPStore("127.0.0.1", port, wait_for_workers=False),
            rank=number,
            world_size=64,
            timeout=limit,
            **options,
        )
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            uuid, count = pipe.recv()
            pipe.send(_handle(contender))
            handles = pipe.recv()
            _reconfigure(contender, uuid, handles, limit)
            data = torch.ones(1)
            dist.all_reduce(data)
            if data.item() != count:
                raise RuntimeError(f"the sum of {count} ranks is {data.item()}")
            pipe.send(time.monotonic())
            with suppress(RuntimeError):
                while True:
                    dist.all_reduce(data)
            pipe.send("failed")


def _handle(contender: str) -> str:
    if contender == "again":
        return torch_hbmcomm.reconfigure_handle()
    text: str = dist._get_reconfigure_handle()  # type: ignore[attr-defined]
    return text


def _reconfigure(contender: str, uuid: int, handles: list[str], limit: timedelta) -> None:
    if contender == "again":
        torch_hbmcomm.reconfigure(uuid, handles, limit)
    else:
        dist._reconfigure(uuid, handles, timeout=limit).wait()  # type: ignore[attr-defined]


def _form(uuid: int, pipes: list[Connection]) -> float:
    """Have the members form a group. Returns the time of its last first all_reduce."""
    for pipe in pipes:
        pipe.send((uuid, len(pipes)))
    handles = [_hear(pipe, "its handle") for pipe in pipes]
    for pipe in pipes:
        pipe.send(handles)
    return max(float(_hear(pipe, "its first all_reduce")) for pipe in pipes)


def _hear(pipe: Connection, what: str) -> Any:
    if not pipe.poll(_LIMIT):
        raise RuntimeError(f"a member has not sent {what} within {_LIMIT:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a member ended") from None


def _await_end(pidfd: int) -> float:
    """Return the time at which the process has ended. Closes the pidfd."""
    try:
        if not select.select([pidfd], [], [], _LIMIT)[0]:
            raise RuntimeError(f"a killed member has not ended within {_LIMIT:.0f} s")
        return time.monotonic()
    finally:
        os.close(pidfd)


def _seconds(contender: str, layout: str) -> Sequence[float]:
    """Return the seconds of each of the PARTS."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "torch.distributed", "torch_hbmcomm"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = layout + layout[-1]
    members, pipes = [], []
    try:
        for number, node in enumerate(nodes):
            ours, theirs = processes.Pipe()
            member = processes.Process(
                target=_member, args=(theirs, number, contender, node, store.port)
            )
            member.start()
            theirs.close()
            members.append(member)
            pipes.append(ours)
        for pipe in pipes:
            _hear(pipe, "that it is ready")
        size = len(layout)
        _form(1, pipes[:size])
        victim = members[size - 1]
        with ThreadPoolExecutor(1) as observer:
            ended = observer.submit(_await_end, os.pidfd_open(victim.pid or 0))
            killed = time.monotonic()
            victim.kill()
            for pipe in pipes[: size - 1]:
                _hear(pipe, "that its group has failed")
            failed = time.monotonic()
            formed = _form(2, pipes[: size - 1] + pipes[size:])
            return ended.result() - killed, failed - killed, formed - failed
    finally:
        for member in members:
            member.kill()
            member.join()


def run(plan: HealPlan) -> Result:
    """Run all jobs. Raises RuntimeError if a member ends or hangs."""
    found = []
    for layout in plan.layouts:
        samples: dict[str, list[Sequence[float]]] = {name: [] for name in plan.contenders}
        for _ in range(plan.rounds):
            for name, taken in samples.items():
                try:
                    taken.append(_seconds(name, layout))
                except RuntimeError as error:
                    raise RuntimeError(f"{name}, layout {layout}: {error}") from error
        found += [
            sampled({"layout": layout, "part": part}, name, [each[i] * 1e6 for each in taken])
            for i, part in enumerate(PARTS)
            for name, taken in samples.items()
        ]
    return Result(
        benchmark="heal",
        machine=describe_machine(),
        plan={"rounds": plan.rounds},
        contenders={name: CONTENDERS[name] for name in plan.contenders},
        unavailable={},
        measurements=found,
    )


def render(result: Result) -> RenderableType:
    """Return a table of the times."""
    first = next(iter(result.contenders))
    headings = {
        "layout": lambda one: str(one.of["layout"]),
        "part": lambda one: str(one.of["part"]),
    }
    title = "From a rank's death to the first right all_reduce of the next group"
    return report.group(
        [
            report.compared(
                title,
                result.measurements,
                headings,
                lambda row, one: report.compared_with(one, row[first], reference=True),
            )
        ],
        result,
    )


@app.command()
def main(
    layouts: Annotated[str, typer.Option(help="Each rank's node, as in aaaa,aabb.")] = (
        "aa,aaaa,aaaaaaaa,aabb"
    ),
    contenders: Annotated[str, typer.Option(help="To measure.")] = ",".join(CONTENDERS),
    rounds: Annotated[int, typer.Option(help="Jobs of each contender.")] = 7,
    json: Json = None,
) -> None:
    """Measure the time from a death to the next group, over hbm and Gloo.

    The exit status never depends on a time.
    """
    check_file(json)
    try:
        plan = HealPlan(layouts=names(layouts), contenders=names(contenders), rounds=rounds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = run(plan)
    except RuntimeError as error:
        fail(str(error))
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
