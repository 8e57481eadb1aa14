"""Layer dropping with a parameter server: Lee et al. 2020, Table 1 and Figs. 5 to 14."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.layer_drop.plot import panels as panels_of_dropping
from papers.report.experiment import Experiment, Label, Run
from torch_hbmcomm.bench.result import Measurement, Result

_RUN = "layer-drop"
_TRAINING = "layer-drop-training"
_RATIOS = (0.9, 0.95, 0.99)
_PAPER = "Lee, Choi, Jeong, Noh, Shin 2020, Communication Optimization Schemes"


def _table(results: Mapping[str, Result]) -> Table:
    rows = [
        [
            str(one.of["case"]),
            one.contender,
            _share(one.values.get("time_share")),
            _share(one.values.get("iteration_share")),
            _share(one.values.get("bytes_share")),
        ]
        for one in results[_RUN].measurements
    ]
    return Table(["network", "who", "time of communication", "an iteration", "bytes"], rows)


def _share(value: float | None) -> str:
    """Return the change of a time, as in "-82.0%", from its share of the time without dropping.

    Returns a dash if the share is negative: in short runs on a busy machine, the computation that
    is subtracted from an iteration may exceed it.
    """
    return "-" if value is None or value < 0 else f"{value - 1:+.1%}"


def _trained(results: Mapping[str, Result]) -> list[Measurement]:
    """Return the contenders of all runs; plain training only once for each case."""
    found: dict[tuple[str, str], Measurement] = {}
    for result in results.values():
        for one in result.measurements:
            found.setdefault((one.of["case"], one.contender), one)
    return sorted(found.values(), key=lambda one: str(one.of["case"]))


def _training(results: Mapping[str, Result]) -> Table:
    rows = []
    for one in _trained(results):
        values = one.values
        sooner = values.get("sooner")
        rows.append(
            [str(one.of["case"]), one.contender]
            + [f"{values[name]:.1%}" for name in ("bytes_share", "iteration_share")]
            + [f"{values['loss']:.3f}", f"{values['accuracy']:.2f}", f"{values['points']:+.2f}"]
            + [f"{values['seconds']:.1f}", "never" if sooner is None else f"{sooner:.2f}"]
        )
    heading = [
        "case",
        "who",
        "bytes",
        "iteration",
        "loss",
        "accuracy, %",
        "points compared with all sent",
    ]
    heading += ["seconds", "times sooner at 0.5 points below the final accuracy of all sent"]
    return Table(heading, rows)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_dropping(results[_RUN])[0]


def _training_panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    first = next(iter(results.values()))
    return panels_of_dropping(replace(first, measurements=_trained(results)))[0]


TABLE_1 = Experiment(
    name=_RUN,
    paper=_PAPER,
    figures="Table 1, Figs. 9 and 14",
    label=Label.EMULATED,
    differs=(
        "Hosts are network namespaces joined by a link. The link has 1 Gbit/s, or no limit where"
        " the paper has 56 Gbit/s. There are always 4 workers; the paper has 8 at 56 Gbit/s. All"
        " run on two cores instead of GPUs. Gradients have ResNet-50's sizes and need almost no"
        " computation; an iteration of the paper has 0.3 to 0.5 s of computation. Communication is"
        " the time of an iteration minus the time of an iteration on one host. On a link without a"
        " limit, communication is within the noise from R = 0.95 on. The next section has the"
        " accuracy."
    ),
    found=(
        "1 Gbit/s, 4 workers: communication takes 3.457 s without dropping and 0.182 s with it (-95"
        " %). An iteration takes 3.918 s without and 0.675 s with it (-82 or -83 %; the paper's"
        " introduction says -85 %).",
        "56 Gbit/s, 8 workers: communication takes 1.951 s without dropping and 0.375 s with it"
        " (-81 %). An iteration takes 2.222 s without and 0.665 s with it (-70 %).",
    ),
    runs=(Run(_RUN, "papers.layer_drop", ["--sections=server"], ["--sections=server", "--quick"]),),
    table=_table,
    panels=_panels,
)


def _training_runs() -> Iterator[Run]:
    """Yield a run of some minutes for each line of the table. Each also trains with all sent."""
    limited = [(name, "1000", ratio) for name in ("SGD", "momentum") for ratio in _RATIOS]
    for optimizer, megabits, ratio in [*limited, ("momentum", "unlimited", _RATIOS[1])]:
        name = f"{optimizer.lower()}-{ratio}" if megabits == "1000" else megabits
        terms = ["--sections=server-training", f"--optimizers={optimizer}"]
        terms += [f"--megabits={megabits}", f"--ratios={ratio}"]
        yield Run(
            f"{_TRAINING}-{name}",
            "papers.layer_drop",
            [*terms, "--seeds=1"],
            [*terms, "--quick", "--training-steps=2"],
        )


TRAINING = Experiment(
    name=_TRAINING,
    paper=_PAPER,
    figures="Figs. 5 to 8 and 10 to 13",
    label=Label.EMULATED,
    differs=(
        "A convolutional net of 542,000 parameters learns 5,000 images of MNIST for 400 steps,"
        " instead of ResNet-50 (on ImageNet at 56 Gbit/s). A server and 4 workers run on two cores,"
        " with a link between two network namespaces. The link has 1 Gbit/s, or no limit where the"
        ' paper has 56 Gbit/s and 8 workers. Rows "R = ..." have LayerDrop\'s defaults. The'
        " paper's rule keeps its threshold between two searches, drops small layers too, and lets"
        " layers wait without a limit. Three of the net's layers have 27 % of its parameters each,"
        " so the paper's threshold is the same at R = 0.9 and 0.95. The paper's accuracy is on"
        " training images, ours is on test images. Each run also trains with everything sent, and"
        " its R is compared with that training. The table shows the first of these trainings."
    ),
    found=(
        "1 Gbit/s: loss and accuracy are worse until about 14,000 steps, and equal in the end."
        " Training converges in about 14,000 s instead of 50,000, which is 3.6 times sooner.",
        "56 Gbit/s: accuracy is lower at equal epochs, and rises faster over time. The authors"
        " trained until the accuracy was similar.",
        "R and the optimizer are not stated.",
    ),
    runs=tuple(_training_runs()),
    table=_training,
    panels=_training_panels,
)
