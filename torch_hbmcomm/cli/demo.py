"""`hbmcomm demo`: trains a small network over hbm and over Gloo, under torchrun."""

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

_NO_TORCH = (
    "hbmcomm demo: PyTorch is not installed, and the memory box alone trains no network; install "
    "torch_hbmcomm (docs/installing.md)"
)


def demo(
    ranks: Annotated[int, typer.Option(min=1, max=32, help="Processes that train together.")] = 2,
) -> None:
    """Train a network to read noisy digits over hbm, then again over Gloo, and compare.

    Takes less than a minute, and makes its data itself.
    Exit status: 0 if the network reads the digits and both backends give the same losses, else 1.
    """
    if find_spec("torch") is None:
        typer.echo(_NO_TORCH, err=True)
        raise typer.Exit(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--module", "torch_hbmcomm.cli.demo_training"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun warns if it has to set this
    environment.pop("HBMCOMM_INSTEAD_OF", None)  # Gloo is the rival here
    raise typer.Exit(subprocess.run(command, env=environment).returncode)
