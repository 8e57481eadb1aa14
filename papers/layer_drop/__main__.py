"""The command: python -m papers.layer_drop --help"""

import signal
import sys
from typing import Annotated

import typer

from benchmarks import verdict
from benchmarks.verdict import JudgedSection
from papers.layer_drop.break_even import BREAK_EVEN
from papers.layer_drop.ddp import DDP
from papers.layer_drop.memory_pass import PASS
from papers.layer_drop.plan import QUICK, VARIANTS, Plan
from papers.layer_drop.server import SERVER
from papers.layer_drop.server_training import SERVER_TRAINING
from papers.layer_drop.threshold import THRESHOLD
from papers.layer_drop.training import TRAINING
from papers.layer_drop.ways import WAYS_OF_DDP
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names, say
from torch_hbmcomm.bench.result import check_names, run

SECTIONS: dict[str, JudgedSection] = {
    section.name: section
    for section in (
        PASS,
        THRESHOLD,
        DDP,
        SERVER,
        TRAINING,
        SERVER_TRAINING,
        WAYS_OF_DDP,
        BREAK_EVEN,
    )
}

_UNLIMITED = "unlimited"

app = typer.Typer(add_completion=False)


@app.command()
def layer_drop(
    sections: report.Choice = "all",
    ratios: Annotated[
        str | None,
        typer.Option(
            help="R, the dropped shares of all gradients, separated by commas.",
            show_default="0.5,0.8,0.9,0.95,0.99",
        ),
    ] = None,
    megabits: Annotated[
        str | None,
        typer.Option(
            help=f"Rates of the link in Mbit/s, separated by commas, or {_UNLIMITED}.",
            show_default=f"1000,{_UNLIMITED}",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="For each R under DDP.", show_default="200")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of the section training.", show_default="12")
    ] = None,
    training_steps: Annotated[
        int | None, typer.Option(min=1, help="Of server-training.", show_default="400")
    ] = None,
    optimizers: Annotated[
        str | None,
        typer.Option(help="Of server-training.", show_default="SGD,momentum"),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(help=f"Of server-training: {','.join(VARIANTS)}.", show_default="none"),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Of training and server-training.", show_default="3"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small nets and few steps, as a check.")
    ] = False,
    json: Json = None,
) -> None:
    """Compare layer dropping with plain training, bfloat16 and PowerSGD, after Lee et al. (2020).

    The sections are:

    - pass: memory bandwidth, and the time that the hook adds to ResNet-50
    - threshold: the time to find a threshold and to compare with it, by layers or by all gradients
    - ddp: 4 ranks on two hosts
    - server: a parameter server and 4 workers; 2 and 8 workers without dropping
    - training: handwritten digits, accuracy over time
    - server-training: the same with the parameter server and a convolutional net
    - break-even: the link on which dropping does not pay
    - ways: the net of server-training under DDP, with each way to send gradients; not in "all"

    All but pass and threshold need root, because hosts are network namespaces. The exit status
    never depends on a time. The whole run takes more than half an hour.
    """
    check_file(json)
    try:
        chosen = report.given(
            ratios=None if ratios is None else [float(ratio) for ratio in names(ratios)],
            megabits=None if megabits is None else [_rate(rate) for rate in names(megabits)],
            steps=steps,
            epochs=epochs,
            training_steps=training_steps,
            optimizers=None if optimizers is None else names(optimizers),
            variants=None if variants is None else names(variants),
            seeds=seeds,
        )
        usual = [name for name in SECTIONS if name != WAYS_OF_DDP.name]
        chosen_sections = usual if sections == "all" else names(sections)
        check_names("section", chosen_sections, SECTIONS)
        plan = Plan(chosen_sections, **((QUICK if quick else {}) | chosen))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes namespaces
    try:
        result = run("layer_drop", SECTIONS, plan, say)
    except RuntimeError as error:
        fail(str(error))
    shown = list(verdict.tables(SECTIONS, result.measurements))
    finish(report.group(shown, result), result, json)


def _rate(text: str) -> int | None:
    return None if text == _UNLIMITED else int(text)


if __name__ == "__main__":
    app()
