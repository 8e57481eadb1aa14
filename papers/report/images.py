"""Images a second over ranks, on the host and in containers: Panda 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.containers.podman import Division
from papers.images.__main__ import images_a_second
from papers.images.rank import ALONE
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    EQUAL,
    PANDA,
    Claim,
    Outcome,
    Spread,
    Unmeasured,
    change,
    graded,
    samples,
)
from torch_hbmcomm.bench.report import rows
from torch_hbmcomm.bench.result import Result

_RUN = "images"
_RIVALS = ("gloo", ALONE)
_COMPARED = ("hbm", *_RIVALS)
_HOST = str(Division(0))
_CNTK = 1.2  # the paper's largest gain with CNTK


def _table(results: Mapping[str, Result]) -> Table:
    lines = []
    for row in rows(results[_RUN].measurements):
        rates = {name: images_a_second(one) for name, one in row.items()}
        of = row["hbm"].of
        lines.append(
            [of["where"], str(of["ranks"])]
            + [f"{rates[name]:.0f}" if name in rates else "-" for name in _COMPARED]
            + [f"{rates['hbm'] / rates[name]:.2f}" if name in rates else "-" for name in _RIVALS]
        )
    heading = ["where", "ranks", *(f"{name}, images/s" for name in _COMPARED)]
    return Table([*heading, *(f"hbm / {name}" for name in _RIVALS)], lines)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    over_ranks = Panel("on the host", "ranks", "images/s")
    divided = Panel("over containers", y="images/s")
    for row in rows(results[_RUN].measurements):
        of = row["hbm"].of
        for name, one in row.items():
            if of["where"] == _HOST:
                xs, ys, _ = over_ranks.lines.setdefault(name, ([], [], "-"))
                xs.append(of["ranks"])
                ys.append(images_a_second(one))
            else:
                divided.bars.setdefault(name, []).append(images_a_second(one))
        if of["where"] != _HOST:
            divided.labels = [*divided.labels, f"{of['where']}\n{of['ranks']} ranks"]
    return [over_ranks, divided] if divided.bars else [over_ranks]


def _gains(results: Mapping[str, Result]) -> dict[int, float]:
    """Return hbm's images a second over Gloo's on the host, by the number of ranks.

    Raises Unmeasured without figures.
    """
    found = {
        row["hbm"].of["ranks"]: images_a_second(row["hbm"]) / images_a_second(row["gloo"])
        for row in rows(results[_RUN].measurements)
        if {"hbm", "gloo"} <= set(row) and row["hbm"].of["where"] == _HOST
    }
    if not found:
        raise Unmeasured("The record has no images a second of hbm and Gloo.")
    return found


def _reason(results: Mapping[str, Result]) -> str:
    return (
        "The peer is Gloo instead of another MPI, and a small net replaces AlexNet;"
        f" {samples(results[_RUN].measurements)}."
    )


def _against_mpi(results: Mapping[str, Result]) -> Outcome:
    gains = _gains(results)
    return Outcome(
        f"Compared with Gloo, hbm changes the images a second by {change(min(gains.values()))} to"
        f" {change(max(gains.values()))}.",
        graded(full=False, part=max(gains.values()) >= _CNTK),
        _reason(results),
    )


def _over_processes(results: Mapping[str, Result]) -> Outcome:
    gains = _gains(results)
    few, many = min(gains), max(gains)
    return Outcome(
        f"The gain over Gloo is {change(gains[few])} with {few} ranks, and {change(gains[many])}"
        f" with {many} ranks on two cores.",
        graded(full=False, part=gains[many] > gains[few]),
        _reason(results),
    )


def _divided(results: Mapping[str, Result]) -> Outcome:
    rates = {
        (one.of["where"], one.of["ranks"]): images_a_second(one)
        for one in results[_RUN].measurements
        if one.contender == "hbm"
    }
    ratio = Spread.of(
        [
            rate / rates[_HOST, ranks]
            for (where, ranks), rate in rates.items()
            if where != _HOST and (_HOST, ranks) in rates
        ],
        "containers and the host",
    )
    return Outcome(
        f"In containers, hbm learns {ratio.span} times the images of as many ranks on the host.",
        graded(ratio.least >= 1 / EQUAL, ratio.median >= 1 / EQUAL),
        "The keynote has no number for containers. Here they share memory on one machine.",
    )


_CLAIMS = (
    Claim(
        PANDA,
        "Slide on CNTK with MVAPICH2-X on CPUs",
        "With reductions in a shared address space (XPMEM), CNTK trains AlexNet on CPUs up to 20 %"
        " better than with Intel MPI (the slide does not state the measure).",
        _against_mpi,
        "It holds in part if the best gain in images a second is at least 20 %, and cannot hold"
        " fully without MPI as the peer.",
    ),
    Claim(
        PANDA,
        "Slide on TensorFlow with MVAPICH2-X on CPUs",
        "SALaR and reductions in a shared address space (XPMEM) give TensorFlow up to 15 % more"
        " images a second at 448 processes, and up to 35 % at 896 (AlexNet on CPUs).",
        _over_processes,
        "It holds in part if the gain grows with the ranks, and cannot hold fully without MPI as"
        " the peer.",
    ),
    Claim(
        PANDA,
        "Slides on MVAPICH2-Virt: containers",
        "MPI in containers performs well.",
        _divided,
        "It holds if containers are at most 10 % slower, and in part if in the median.",
    ),
)


IMAGES = Experiment(
    name=_RUN,
    figures="images a second, host and containers",
    label=Label.MEASURED,
    differs=(
        "A net of 1.2 million parameters, with 8 random images per rank and up to 8 ranks on two"
        " cores, replaces AlexNet on clusters. If ranks outnumber the cores, further ranks add"
        " communication but no speed. The keynote compares with MPI, not with Gloo."
    ),
    claims=_CLAIMS,
    runs=(Run(_RUN, "papers.images", [], ["--ranks=2,4", "--rounds=1", "--steps=3"]),),
    table=_table,
    panels=_panels,
)
