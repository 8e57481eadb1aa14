"""`hbmcomm bench collectives` with more contenders: python -m benchmarks.collectives --help"""

import typer

from benchmarks.collectives.bound import Bound
from benchmarks.collectives.deepspeed import DeepSpeed, DeepSpeedInC
from benchmarks.collectives.mpi_objects import MpiObjects
from benchmarks.collectives.native import (
    STANDARD_ABI,
    HbmInC,
    IntelMpi,
    MpiInC,
    MpiInPlace,
    MpiStaged,
    Slots,
)
from benchmarks.collectives.open_mpi import OpenMpi
from torch_hbmcomm.bench import collectives as installed
from torch_hbmcomm.bench.contenders import OVER_MPI, Contender
from torch_hbmcomm.cli import bench

app = typer.Typer(add_completion=False)
app.command()(bench.collectives)


def contenders() -> dict[str, Contender]:
    """Return the contenders in the order of the tables."""
    known = installed.CONTENDERS
    below = "hbm below Python and the dispatcher"
    everyone = (
        known["hbm-zero-copy"],
        known["hbm-staged"],
        known["hbm-mpi"],
        HbmInC("hbm-c-zero-copy", f"{below}, on memory of the segment", zero_copy=True),
        HbmInC("hbm-c-staged", f"{below}, on plain memory"),
        HbmInC("hbm-c-mpi", f"{below}, over MPI, on plain memory", node=OVER_MPI),
        HbmInC(
            "hbm-c-mpi-abi",
            "the same by libmpi_abi.so.1, MPI 5's standard ABI",
            node=OVER_MPI,
            library=STANDARD_ABI,
        ),
        known["gloo"],
        known["mpich"],
        MpiInC(),
        MpiInPlace(),
        MpiStaged(),
        IntelMpi(),
        OpenMpi(),
        MpiObjects(),
        DeepSpeed(),
        DeepSpeedInC(),
        known["nothing"],
        Slots(),
        Bound(),
    )
    return {one.name: one for one in everyone}


if __name__ == "__main__":
    installed.CONTENDERS = contenders()
    app()
