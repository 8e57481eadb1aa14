"""`hbmcomm bench`: contenders side by side in one run."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Measure against Gloo, MPI and others, in one run.", no_args_is_help=True)

Ranks = Annotated[int, typer.Option(min=2, help="Processes, all on this machine.")]
Rounds = Annotated[int, typer.Option(min=1, help="The median is of these.")]
Json = Annotated[
    Path | None, typer.Option(dir_okay=False, writable=True, help="Also write the samples.")
]
Png = Annotated[
    Path | None, typer.Option(dir_okay=False, writable=True, help="Also plot (extra: bench).")
]


@app.command()
def collectives(
    contenders: Annotated[
        str, typer.Option(help="Names separated by commas; all: those that can run here.")
    ] = "all",
    collectives: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    sizes: Annotated[
        str | None,
        typer.Option(help="As in 8,64KiB,1MiB.", show_default="some for each collective"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element types, separated by commas.")] = "float32",
    ranks: Ranks = 2,
    rounds: Rounds = 21,
    startup_rounds: Annotated[
        int, typer.Option(min=0, help="Fresh starts of each contender; 0 leaves startup out.")
    ] = 3,
    json: Json = None,
    png: Png = None,
) -> None:
    """Median time of each collective, the contenders interleaved round-robin in one run.

    The table startup is init_process_group and a first collective in fresh processes. The exit
    status never depends on a time. Everything takes some minutes.
    """
    _check_files(json, png)
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        _fail("--png needs matplotlib; install it with: pip install 'torch_hbmcomm[bench]'")

    from torch_hbmcomm.bench import run, table
    from torch_hbmcomm.bench.collectives import COLLECTIVES
    from torch_hbmcomm.bench.contenders import CONTENDERS
    from torch_hbmcomm.bench.sizes import parse_bytes

    try:
        plan = run.Plan(
            contenders=list(CONTENDERS) if contenders == "all" else _names(contenders),
            collectives=list(COLLECTIVES) if collectives == "all" else _names(collectives),
            sizes=None if sizes is None else [parse_bytes(size) for size in _names(sizes)],
            dtypes=_names(dtype),
            ranks=ranks,
            rounds=rounds,
            startup_rounds=startup_rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if png is not None and not any(cell.bytes for cell in plan.cells()):
        raise typer.BadParameter("--png has nothing to plot: barrier alone has no sizes")

    unavailable = plan.unavailable()
    for name, cause in unavailable.items():
        if contenders != "all":
            _fail(f"{name}: {cause}")
        typer.echo(f"not measured: {name}: {cause}", err=True)
    try:
        result = run.run(plan, unavailable)
    except RuntimeError as error:
        _fail(str(error))

    _console().print(table.render(result))
    if json is not None:
        json.write_text(result.to_json())
    if png is not None:
        from torch_hbmcomm.bench import plot

        plot.save(result, png)


@app.command()
def ddp(
    contenders: Annotated[
        str, typer.Option(help="Names separated by commas: hbm, hbm-mpi, gloo.")
    ] = "hbm,gloo",
    models: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    ranks: Ranks = 2,
    rounds: Rounds = 21,
    json: Json = None,
) -> None:
    """Median time of a training step under DistributedDataParallel, and what communication adds.

    The same model trains over each contender in the same processes, interleaved round-robin: one
    that is bound by communication, and one that is bound by compute.
    """
    _check_files(json)
    from torch_hbmcomm.bench import ddp, ddp_table
    from torch_hbmcomm.bench.models import MODELS

    try:
        plan = ddp.Plan(
            contenders=_names(contenders),
            models=list(MODELS) if models == "all" else _names(models),
            ranks=ranks,
            rounds=rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = ddp.run(plan)
    except RuntimeError as error:
        _fail(str(error))

    _console().print(ddp_table.render(result))
    if json is not None:
        json.write_text(result.to_json())


def _console() -> Console:
    """As wide as the terminal; wide enough for every contender in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else 160)


def _check_files(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no such directory")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _fail(message: str) -> None:
    typer.echo(f"hbmcomm bench: {message}", err=True)
    raise typer.Exit(1)
