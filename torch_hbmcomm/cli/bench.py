"""`hbmcomm bench`: contenders side by side in one run."""

import importlib.util
import signal
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
    _check_matplotlib(png)

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


@app.command()
def box(
    sections: Annotated[
        str, typer.Option(help="Names separated by commas; all: those that can run here.")
    ] = "all",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and two rounds: does it work at all?")
    ] = False,
    largest: Annotated[
        str | None, typer.Option(help="Read, write or accumulate.", show_default="256MiB")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The median is of these.", show_default="11")
    ] = None,
    lanes: Annotated[int, typer.Option(min=1, help="Connections of tcp.")] = 4,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="That accumulate on the box.", show_default="one for each core"),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(help="Counts of those that work at a time.", show_default="2,4,8,16,32"),
    ] = None,
    megabits: Annotated[int, typer.Option(min=1, help="Mbit/s of the slow link.")] = 1000,
    store: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, exists=True, help="Also measure a store, somewhere below here."
        ),
    ] = None,
    json: Json = None,
    png: Png = None,
) -> None:
    """The memory box beside the bounds of this machine, and its rivals, interleaved in one run.

    Sections: shm, tcp, link (root: it makes network namespaces), verbs (an RDMA device),
    accumulate, latency, clients, rivals (MPI, PyTorch's RPC) and store. The exit status never
    depends on a time. Everything takes some minutes.
    """
    _check_files(json, png)
    _check_matplotlib(png)
    from torch_hbmcomm.bench.box import run, table
    from torch_hbmcomm.bench.box.plan import QUICK, Plan
    from torch_hbmcomm.bench.box.sections import SECTIONS
    from torch_hbmcomm.bench.names import check_names
    from torch_hbmcomm.bench.sizes import parse_bytes

    names = list(SECTIONS) if sections == "all" else _names(sections)
    try:
        check_names("section", names, SECTIONS)
        given = {
            "largest": None if largest is None else parse_bytes(largest),
            "rounds": rounds,
            "threads": threads,
            "clients": None if clients is None else [int(count) for count in _names(clients)],
            "store": store,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = QUICK if quick else {}
        plan = Plan(sections=names, lanes=lanes, megabits=megabits, **(defaults | chosen))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes boxes and namespaces
    try:
        result = run.run(plan, _say)
    except RuntimeError as error:
        _fail(str(error))

    _console().print(table.render(result))
    if json is not None:
        json.write_text(result.to_json())
    if png is not None:
        from torch_hbmcomm.bench.box import plot

        plot.save(result, png)


def _say(section: str) -> None:
    """On a terminal alone, before it is measured."""
    if sys.stderr.isatty():
        typer.echo(f"measuring {section} ...", err=True)


def _console() -> Console:
    """As wide as the terminal; wide enough for every contender in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else 160)


def _check_files(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no such directory")


def _check_matplotlib(png: Path | None) -> None:
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        _fail("--png needs matplotlib; install it with: pip install 'torch_hbmcomm[bench]'")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _fail(message: str) -> None:
    typer.echo(f"hbmcomm bench: {message}", err=True)
    raise typer.Exit(1)
