"""Options that the benchmarks share, and what they do with them."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

Ranks = Annotated[int, typer.Option(min=2, help="Processes, all on this machine.")]
Rounds = Annotated[int, typer.Option(min=1, help="The median is of these.")]
Json = Annotated[
    Path | None, typer.Option(dir_okay=False, writable=True, help="Also write the samples.")
]
Png = Annotated[
    Path | None, typer.Option(dir_okay=False, writable=True, help="Also plot (extra: bench).")
]


def say(what: str) -> None:
    """On a terminal alone, before it is measured."""
    if sys.stderr.isatty():
        typer.echo(f"measuring {what} ...", err=True)


def console() -> Console:
    """As wide as the terminal; wide enough for every contender in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else 160)


def check_files(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no such directory")


def check_matplotlib(png: Path | None) -> None:
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        fail("--png needs matplotlib; install it with: pip install 'torch_hbmcomm[bench]'")


def names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def fail(message: str) -> NoReturn:
    typer.echo(f"hbmcomm bench: {message}", err=True)
    raise typer.Exit(1)
