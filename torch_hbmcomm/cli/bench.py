"""`hbmcomm bench`: contenders side by side in one run."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from torch_hbmcomm.cli.bench_layer_drop import layerdrop
from torch_hbmcomm.cli.bench_options import (
    Json,
    Png,
    Ranks,
    Rounds,
    check_files,
    check_matplotlib,
    console,
    fail,
    names,
    say,
)

app = typer.Typer(help="Measure against Gloo, MPI and others, in one run.", no_args_is_help=True)


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
    check_files(json, png)
    check_matplotlib(png)

    from torch_hbmcomm.bench import run, table
    from torch_hbmcomm.bench.collectives import COLLECTIVES
    from torch_hbmcomm.bench.contenders import CONTENDERS
    from torch_hbmcomm.bench.sizes import parse_bytes

    try:
        plan = run.Plan(
            contenders=list(CONTENDERS) if contenders == "all" else names(contenders),
            collectives=list(COLLECTIVES) if collectives == "all" else names(collectives),
            sizes=None if sizes is None else [parse_bytes(size) for size in names(sizes)],
            dtypes=names(dtype),
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
            fail(f"{name}: {cause}")
        typer.echo(f"not measured: {name}: {cause}", err=True)
    try:
        result = run.run(plan, unavailable)
    except RuntimeError as error:
        fail(str(error))

    console().print(table.render(result))
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
    check_files(json)
    from torch_hbmcomm.bench import ddp, ddp_table
    from torch_hbmcomm.bench.models import MODELS

    try:
        plan = ddp.Plan(
            contenders=names(contenders),
            models=list(MODELS) if models == "all" else names(models),
            ranks=ranks,
            rounds=rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = ddp.run(plan)
    except RuntimeError as error:
        fail(str(error))

    console().print(ddp_table.render(result))
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
    check_files(json, png)
    check_matplotlib(png)
    from torch_hbmcomm.bench.box import run, table
    from torch_hbmcomm.bench.box.plan import QUICK, Plan
    from torch_hbmcomm.bench.box.sections import SECTIONS
    from torch_hbmcomm.bench.names import check_names
    from torch_hbmcomm.bench.sizes import parse_bytes

    chosen_sections = list(SECTIONS) if sections == "all" else names(sections)
    try:
        check_names("section", chosen_sections, SECTIONS)
        given = {
            "largest": None if largest is None else parse_bytes(largest),
            "rounds": rounds,
            "threads": threads,
            "clients": None if clients is None else [int(count) for count in names(clients)],
            "store": store,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = QUICK if quick else {}
        plan = Plan(sections=chosen_sections, lanes=lanes, megabits=megabits, **(defaults | chosen))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes boxes and namespaces
    try:
        result = run.run(plan, say)
    except RuntimeError as error:
        fail(str(error))

    console().print(table.render(result))
    if json is not None:
        json.write_text(result.to_json())
    if png is not None:
        from torch_hbmcomm.bench.box import plot

        plot.save(result, png)


@app.command()
def async_sgd(
    sections: Annotated[
        str, typer.Option(help="Names separated by commas; all: those that can run here.")
    ] = "all",
    scenarios: Annotated[str, typer.Option(help="sequential, parallel, or all.")] = "all",
    models: Annotated[
        str | None,
        typer.Option(help="Names separated by commas.", show_default="some for each section"),
    ] = None,
    transports: Annotated[str, typer.Option(help="shm, tcp, or all.")] = "all",
    contenders: Annotated[
        str,
        typer.Option(help="Names separated by commas, as in the tables, or all."),
    ] = "all",
    workers: Annotated[
        str | None,
        typer.Option(help="Counts of those that train at a time.", show_default="2,4,8"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and one round: does it work at all?")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns of each contender in node and link.", show_default="1"),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="That count in a turn.", show_default="4")
    ] = None,
    lanes: Annotated[int, typer.Option(min=1, help="Connections of tcp.")] = 4,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="That accumulate on the box.", show_default="one for each core"),
    ] = None,
    megabits: Annotated[int, typer.Option(min=1, help="Mbit/s of the slow link.")] = 1000,
    json: Json = None,
    png: Png = None,
) -> None:
    """Asynchronous SGD, emulated: the memory box beside MPI and PyTorch's RPC, in one run.

    Six networks, after Ahn et al. (2018): computation is a sleep; gradients go to a server that
    adds them, and weights come back. Sections: node (all on this machine), link (root: the
    server behind a slow cable), straggler and accuracy (PyTorch trains, beside a slow worker and
    on handwritten digits). The exit status never depends on a time. Everything takes some minutes.
    """
    check_files(json, png)
    check_matplotlib(png)
    from torch_hbmcomm.bench.async_sgd import run, table
    from torch_hbmcomm.bench.async_sgd.plan import QUICK, TRANSPORTS, Plan
    from torch_hbmcomm.bench.async_sgd.scenarios import SCENARIOS
    from torch_hbmcomm.bench.async_sgd.sections import SECTIONS

    try:
        given = {
            "models": None if models is None else names(models),
            "contenders": None if contenders == "all" else names(contenders),
            "workers": None if workers is None else [int(count) for count in names(workers)],
            "rounds": rounds,
            "iterations": iterations,
            "threads": threads,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        plan = Plan(
            sections=list(SECTIONS) if sections == "all" else names(sections),
            scenarios=list(SCENARIOS) if scenarios == "all" else names(scenarios),
            transports=TRANSPORTS if transports == "all" else names(transports),
            lanes=lanes,
            megabits=megabits,
            **((QUICK if quick else {}) | chosen),
        )
        run.check(plan)
        if png is not None and not any(SECTIONS[name].goals for name in plan.sections):
            raise ValueError("--png has nothing to plot: name the section node or link")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes boxes and namespaces
    try:
        result = run.run(plan, say)
    except RuntimeError as error:
        fail(str(error))

    console().print(table.render(result))
    if json is not None:
        json.write_text(result.to_json())
    if png is not None:
        if not result.measurements:
            fail("--png has nothing to plot: no section that it shows was measured")
        from torch_hbmcomm.bench.async_sgd import plot

        plot.save(result, png)


app.command()(layerdrop)
