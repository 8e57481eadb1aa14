"""`hbmcomm bench collectives` with more contenders: python -m benchmarks.collectives --help"""

import typer

from benchmarks.collectives.bound import Bound
from benchmarks.collectives.deepspeed import DeepSpeed
from benchmarks.collectives.mpi_objects import MpiObjects
from benchmarks.collectives.native import (
    NATIVE,
    HbmBelow,
    IntelMpi,
    MpichBelow,
    MpiInC,
    MpiInPlace,
    StandardAbi,
)
from benchmarks.collectives.open_mpi import OpenMpi
from torch_hbmcomm.bench import collectives as installed
from torch_hbmcomm.bench.collectives import SMALL, Collective
from torch_hbmcomm.bench.contenders import OVER_MPI, Contender
from torch_hbmcomm.cli import bench

app = typer.Typer(add_completion=False)
app.command()(bench.collectives)


def contenders() -> dict[str, Contender]:
    """Return the contenders in the order of the tables."""
    known = installed.CONTENDERS
    everyone = (
        HbmBelow("hbm-zero-copy", known["hbm-zero-copy"].about, zero_copy=True),
        HbmBelow("hbm-staged", known["hbm-staged"].about),
        HbmBelow("hbm-mpi", known["hbm-mpi"].about, node=OVER_MPI),
        StandardAbi(),
        known["gloo"],
        MpichBelow(),
        MpiInC(),
        MpiInPlace(),
        IntelMpi(),
        OpenMpi(),
        MpiObjects(),
        DeepSpeed(),
        known["nothing"],
        Bound(),
    )
    return {one.name: one for one in everyone}


if __name__ == "__main__":
    installed.CONTENDERS = contenders()
    installed.COLLECTIVES |= {NATIVE: Collective(NATIVE, SMALL)}
    app()
