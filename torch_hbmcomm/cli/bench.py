"""`hbmcomm bench`: measures contenders side by side in one run."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from torch_hbmcomm.bench.report import (
    Choice,
    Json,
    Lanes,
    Ranks,
    Rounds,
    Threads,
    check_file,
    fail,
    finish,
    given,
    names,
    say,
)

app = typer.Typer(help="Measure against Gloo, MPI and others, in one run.", no_args_is_help=True)


def _moved_plot(asked: bool) -> None:
    if asked:
        typer.echo(
            "hbmcomm bench: plots are made of --json's file, in a checkout of the repository: "
            "python -m benchmarks.plot RESULT.json PLOT.png",
            err=True,
        )
        raise typer.Exit(2)


Png = Annotated[bool, typer.Option("--png", callback=_moved_plot, is_eager=True, hidden=True)]


@app.command()
def collectives(
    contenders: Choice = "all",
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
    png: Png = False,
) -> None:
    """Measure the median, minimum and mean time of single calls of each collective.

    Contenders take turns in one run, and each is measured alone, too; ratios are of medians. The
    table startup has the time of init_process_group and a first collective, in fresh processes. The
    exit status never depends on a time. All sizes together take some minutes.
    """
    check_file(json)
    from torch_hbmcomm.bench import collectives as measured
    from torch_hbmcomm.sizes import parse_bytes

    try:
        plan = measured.CollectivesPlan(
            contenders=measured.chosen("contender", contenders, measured.CONTENDERS),
            collectives=measured.chosen("collective", collectives, measured.COLLECTIVES),
            sizes=None if sizes is None else [parse_bytes(size) for size in names(sizes)],
            dtypes=names(dtype),
            ranks=ranks,
            rounds=rounds,
            startup_rounds=startup_rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    unavailable = plan.unavailable()
    for name, cause in unavailable.items():
        if contenders != "all":
            fail(f"{name}: {cause}")
        typer.echo(f"not measured: {name}: {cause}", err=True)
    try:
        result = measured.run(plan, unavailable)
    except RuntimeError as error:
        fail(str(error))
    finish(measured.render(result), result, json)


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
    """Measure a training step under DistributedDataParallel, and the time for communication.

    The same model trains over each contender, in the same processes. Contenders take turns, and are
    then measured alone. One model is bound by communication, one by compute. Ratios are of medians.
    """
    check_file(json)
    from torch_hbmcomm.bench import ddp as measured

    try:
        plan = measured.DdpPlan(
            contenders=names(contenders),
            models=list(measured.MODELS) if models == "all" else names(models),
            ranks=ranks,
            rounds=rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = measured.run(plan)
    except RuntimeError as error:
        fail(str(error))
    finish(measured.render(result), result, json)


@app.command()
def box(
    sections: Choice = "all",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and two rounds: does it work at all?")
    ] = False,
    largest: Annotated[
        str | None, typer.Option(help="Read, write or accumulate.", show_default="256MiB")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of each contender.", show_default="11")
    ] = None,
    lanes: Lanes = 4,
    threads: Threads = None,
    clients: Annotated[
        str | None,
        typer.Option(help="Counts of those that work at a time.", show_default="2,4,8,16,32"),
    ] = None,
    megabits: Annotated[
        int, typer.Option(min=1, hidden=True, help="Of the link that benchmarks.box has.")
    ] = 1000,
    store: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, exists=True, help="Also measure a store, somewhere below here."
        ),
    ] = None,
    json: Json = None,
    png: Png = False,
) -> None:
    """Measure the memory box on this machine, through its Python client.

    Sections: shm, tcp, verbs (an RDMA device), accumulate, latency, clients and store. The exit
    status never depends on a time. Everything takes some minutes. A checkout of the repository
    also measures the box against others: python -m benchmarks.box.
    """
    check_file(json)
    from torch_hbmcomm.bench import box as measured
    from torch_hbmcomm.bench.result import check_names, run
    from torch_hbmcomm.sizes import parse_bytes

    try:
        chosen_sections = list(measured.SECTIONS) if sections == "all" else names(sections)
        check_names("section", chosen_sections, measured.SECTIONS)
        chosen = given(
            largest=None if largest is None else parse_bytes(largest),
            rounds=rounds,
            threads=threads,
            clients=None if clients is None else [int(count) for count in names(clients)],
            store=store,
        )
        plan = measured.BoxPlan(
            sections=chosen_sections,
            lanes=lanes,
            megabits=megabits,
            **((measured.QUICK if quick else {}) | chosen),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so SIGTERM also ends boxes and clients
    try:
        result = run("box", measured.SECTIONS, plan, say)
    except RuntimeError as error:
        fail(str(error))
    finish(measured.render(result), result, json)


@app.command()
def memory(
    size: Annotated[
        str | None,
        typer.Option(
            help="Of each of three arrays on a node.",
            show_default="256MiB, or 8 times the L3 cache",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each node.")] = 7,
    json: Json = None,
) -> None:
    """Measure the bandwidth and the latency of each NUMA node, and say whether HBM pays.

    The command measures from the processors of one node, with a thread on each core: the first node
    that it may use (numactl chooses another). The exit status never depends on a time.
    """
    check_file(json)
    from torch_hbmcomm.bench import memory as measured
    from torch_hbmcomm.bench.result import run
    from torch_hbmcomm.sizes import parse_bytes

    try:
        bytes_of_one = measured.default_size() if size is None else parse_bytes(size)
        plan = measured.MemoryPlan(size=bytes_of_one, rounds=rounds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = run("memory", measured.SECTIONS, plan, say)
    except (RuntimeError, ValueError) as error:  # ValueError: no CPUs of a node to bind to
        fail(str(error))
    finish(measured.render(result), result, json)


_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(hidden=True, context_settings=_ANYTHING)
def async_sgd() -> None:
    """Moved to papers/async_sgd of the repository."""
    _moved("async-sgd", "async_sgd")


@app.command(hidden=True, context_settings=_ANYTHING)
def layerdrop() -> None:
    """Moved to papers/layer_drop of the repository."""
    _moved("layerdrop", "layer_drop")


def _moved(command: str, module: str) -> None:
    typer.echo(
        f"hbmcomm bench {command} has moved to the repository; in a checkout: "
        f"python -m papers.{module}",
        err=True,
    )
    raise typer.Exit(2)
