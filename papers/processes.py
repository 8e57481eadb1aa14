"""Collectives with one contender in memory at a time: python -m papers.processes --help

Each contender has its own ranks, and ends before the next one starts. So more memory is left for
its tensors than in benchmarks.collectives, whose ranks have the tensors of all contenders. Woo et
al. 2020 have tensors of 256 MB, and parts of 16 MB in a gather. If the free memory is too small for
a contender, its tensors have the largest size that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.collectives.__main__ import contenders as known_contenders
from papers.async_sgd.emulation import free_memory
from torch_hbmcomm.bench.collectives import COLLECTIVES, CollectivesPlan, chosen, render, run
from torch_hbmcomm.bench.contenders import Contender
from torch_hbmcomm.bench.report import Json, Ranks, check_file, fail, finish, names
from torch_hbmcomm.bench.result import Measurement, Result, check_names, describe_machine
from torch_hbmcomm.sizes import MIB, format_bytes, parse_bytes

CONTENDERS = ("hbm-zero-copy", "hbm-staged", "hbm-mpi", "mpi-c-in-place", "mpich", "mpi-objects")
PROCESS = 160 * MIB  # a rank without tensors
_COPIES = 1.5  # of a tensor, in the rank's memory at a time
_COPIES_OF_OBJECTS = 4.5
_WHOLE = ("broadcast", "allreduce")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Room:
    """The memory for the tensors of a contender.

    copies: the copies of a tensor that are in memory at a time.
    free: the free bytes, of which each rank's process takes PROCESS.
    """

    ranks: int
    copies: float
    free: int

    def fitting(self, asked: int, tensors: int) -> int:
        """Return `asked`, or the largest number of whole MiB if `tensors` tensors of `asked` bytes
        do not fit. Raises ValueError if no MiB fits."""
        size = int((self.free - self.ranks * PROCESS) / (self.copies * tensors))
        if size >= asked:
            return asked
        if size < MIB:
            raise ValueError(
                f"{self} leave no memory for tensors: take fewer ranks, or end other programs"
            )
        return size // MIB * MIB

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.free)} of free memory, {self.ranks} processes of"
            f" {format_bytes(PROCESS)}, and {self.copies:g} copies of each tensor"
        )


def plans(
    contender: Contender, room: Room, size: int, part: int, dtypes: list[str], rounds: int
) -> Iterator[CollectivesPlan]:
    """Yield the plan of the collectives of whole tensors, and the plan of the gather."""
    whole = room.fitting(size, room.ranks)
    # The root has all parts, and each rank has its own.
    gathered = room.ranks * room.fitting(part, 2 * room.ranks)
    for collectives, count in ((_WHOLE, whole), (("gather",), gathered)):
        yield CollectivesPlan(
            contenders=[contender],
            collectives=[COLLECTIVES[name] for name in collectives],
            sizes=[count],
            dtypes=dtypes,
            ranks=room.ranks,
            rounds=rounds,
            startup_rounds=0,
        )


def room_of(contender: Contender, ranks: int) -> Room:
    copies = _COPIES_OF_OBJECTS if contender.name == "mpi-objects" else _COPIES
    return Room(ranks, copies, free_memory())


def measured(plan: CollectivesPlan) -> list[Measurement]:
    """Return the measurements of a plan's contender. Raises RuntimeError if it cannot run."""
    for name, cause in plan.unavailable().items():
        raise RuntimeError(f"{name}: {cause}")
    return list(run(plan, {}).measurements)


@app.command()
def main(
    ranks: Ranks = 32,
    size: Annotated[str, typer.Option(help="Bytes of a broadcast and an allreduce.")] = "256MiB",
    part: Annotated[str, typer.Option(help="Bytes of each rank's part in a gather.")] = "16MiB",
    contenders: Annotated[str, typer.Option(help="Names separated by commas.")] = ",".join(
        CONTENDERS
    ),
    dtype: Annotated[str, typer.Option(help="Element types, separated by commas.")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 3,
    json: Json = None,
) -> None:
    """Time broadcast, allreduce and gather, one contender after another.

    Before a contender starts, its sizes and the memory that limits them are printed. The exit
    status never depends on a time.
    """
    check_file(json)
    found: list[Measurement] = []
    about = {}
    try:
        check_names("contender", names(contenders), CONTENDERS)
        for contender in chosen("contender", contenders, known_contenders()):
            room = room_of(contender, ranks)
            for plan in plans(
                contender, room, parse_bytes(size), parse_bytes(part), names(dtype), rounds
            ):
                for cell in plan.cells():
                    typer.echo(f"{contender.name}: {cell}: {room}", err=True)
                found += measured(plan)
            about[contender.name] = contender.about
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RuntimeError as error:
        fail(str(error))
    result = Result(
        benchmark="processes",
        machine=describe_machine(),
        plan={"ranks": ranks, "rounds": rounds},
        contenders=about,
        measurements=found,
    )
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
