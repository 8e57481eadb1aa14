"""The command: python -m papers.async_sgd --help"""

import signal
import sys
from typing import Annotated

import typer

from benchmarks import verdict
from benchmarks.verdict import JudgedSection
from papers.async_sgd.accuracy import ACCURACY
from papers.async_sgd.contenders import CONTENDERS
from papers.async_sgd.plan import QUICK, TRANSPORTS, Plan
from papers.async_sgd.sections import LINK, NODE
from papers.async_sgd.straggler import STRAGGLER
from papers.async_sgd.workload import SCENARIOS
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names, say
from torch_hbmcomm.bench.result import check_names, run

SECTIONS: dict[str, JudgedSection] = {
    section.name: section for section in (NODE, LINK, STRAGGLER, ACCURACY)
}

app = typer.Typer(add_completion=False)


@app.command()
def async_sgd(
    sections: report.Choice = "all",
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
        typer.Option(help="Numbers of workers, separated by commas.", show_default="2,4,8"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and one round, as a check.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns of each contender in node and link.", show_default="1"),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Counted in a turn.", show_default="4")
    ] = None,
    lanes: report.Lanes = 4,
    threads: report.Threads = None,
    megabits: Annotated[int, typer.Option(min=1, help="Mbit/s of the slow link.")] = 1000,
    json: Json = None,
) -> None:
    """Asynchronous SGD, emulated: compare the memory box with MPI and PyTorch's RPC.

    Six networks, after Ahn et al. (2018): computation is a sleep; gradients go to a server that
    adds them, and weights come back. Sections: node (all on this machine), link (root: the server
    behind a slow link), straggler (PyTorch trains, with one slow worker) and accuracy (PyTorch
    learns handwritten digits). The exit status never depends on a time. The whole run takes some
    minutes.
    """
    check_file(json)
    try:
        chosen = report.given(
            models=None if models is None else names(models),
            contenders=None if contenders == "all" else names(contenders),
            workers=None if workers is None else [int(count) for count in names(workers)],
            rounds=rounds,
            iterations=iterations,
            threads=threads,
        )
        plan = Plan(
            sections=list(SECTIONS) if sections == "all" else names(sections),
            scenarios=list(SCENARIOS) if scenarios == "all" else names(scenarios),
            transports=TRANSPORTS if transports == "all" else names(transports),
            lanes=lanes,
            megabits=megabits,
            **((QUICK if quick else {}) | chosen),
        )
        check_names("section", plan.sections, SECTIONS)
        if plan.contenders is not None:
            check_names("contender", plan.contenders, CONTENDERS)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes boxes and namespaces
    abouts = {name: contender.about for name, contender in CONTENDERS.items()}
    try:
        result = run("async_sgd", SECTIONS, plan, say, abouts)
    except RuntimeError as error:
        fail(str(error))
    shown = list(verdict.tables(SECTIONS, result.measurements))
    finish(report.group(shown, result), result, json)


if __name__ == "__main__":
    app()
