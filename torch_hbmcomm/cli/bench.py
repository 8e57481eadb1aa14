"""`hbmcomm bench`: contenders side by side in one run."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Measure against Gloo, in the same run.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
def collectives(
    backends: Annotated[str, typer.Option(help="Contenders, separated by commas.")] = "hbm,gloo",
    ranks: Annotated[int, typer.Option(min=2, help="Processes, all on this machine.")] = 2,
    collectives: Annotated[
        str, typer.Option(help="Names separated by commas, or all.", show_default=True)
    ] = "all",
    min_bytes: Annotated[str, typer.Option(help="The smallest size.")] = "8",
    max_bytes: Annotated[str, typer.Option(help="The largest; x8 steps between.")] = "64MiB",
    sizes: Annotated[
        str | None, typer.Option(help="Exactly these, separated by commas: 8,4096,1MiB.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="The median is of these.")] = 15,
    startup_rounds: Annotated[
        int, typer.Option(min=0, help="Fresh starts of each contender; 0 leaves startup out.")
    ] = 5,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Also write the samples.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Also plot (extra: bench).")
    ] = None,
) -> None:
    """Median time of each collective, the contenders interleaved round-robin in one run.

    The row startup is init_process_group and a first collective in fresh processes. In red rows
    hbm was slower. The exit status never depends on a time.
    """
    for path in (json, png):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no such directory")
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        _fail("--png needs matplotlib; install it with: pip install 'torch_hbmcomm[bench]'")

    from torch_hbmcomm.bench import run, table
    from torch_hbmcomm.bench.collectives import COLLECTIVES
    from torch_hbmcomm.bench.sizes import ladder, parse_bytes

    try:
        plan = run.Plan(
            contenders=_names(backends),
            collectives=list(COLLECTIVES) if collectives == "all" else _names(collectives),
            sizes=(
                [parse_bytes(size) for size in _names(sizes)]
                if sizes is not None
                else ladder(parse_bytes(min_bytes), parse_bytes(max_bytes))
            ),
            ranks=ranks,
            rounds=rounds,
            startup_rounds=startup_rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if png is not None and not any(cell.bytes for cell in plan.cells()):
        raise typer.BadParameter("--png has nothing to plot: barrier alone has no sizes")
    try:
        result = run.run(plan)
    except RuntimeError as error:
        _fail(str(error))

    Console().print(table.render(result))
    if json is not None:
        json.write_text(result.to_json())
    if png is not None:
        from torch_hbmcomm.bench import plot

        plot.save(result, png)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _fail(message: str) -> None:
    typer.echo(f"hbmcomm bench: {message}", err=True)
    raise typer.Exit(1)
