"""`hbmcomm demo`: trains a small network over hbm and over Gloo, under torchrun."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from torch_hbmcomm.native_advice import releases, what_is_missing

_NO_TORCH = (
    "hbmcomm demo: PyTorch is not installed, and the memory box alone trains no network; install "
    "torch_hbmcomm (docs/installing.md)"
)


def demo(
    ranks: Annotated[int, typer.Option(min=1, max=32, help="Processes that train together.")] = 2,
) -> None:
    """Train a network to read noisy digits over hbm, then again over Gloo, and compare.

    Takes a minute, and makes its data itself.
    Exit status: 0 if the network reads the digits and both backends give the same losses, else 1.
    """
    if find_spec("torch") is None:
        typer.echo(_NO_TORCH, err=True)
        raise typer.Exit(1)
    if lacking := _without_process_group():
        typer.echo(f"hbmcomm demo: {lacking}", err=True)
        raise typer.Exit(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--module", "torch_hbmcomm.cli.demo_training"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun warns if it has to set this
    environment.pop("HBMCOMM_INSTEAD_OF", None)  # Gloo is the rival here
    raise typer.Exit(subprocess.run(command, env=environment).returncode)


def _without_process_group() -> str | None:
    """Return why the ranks could load no process group; None if they can. Does not import torch."""
    package = Path(__file__).resolve().parents[1]
    torch = version("torch").partition("+")[0]
    if ".".join(torch.split(".")[:2]) in releases(package):
        return None
    return what_is_missing(str(package), torch)
