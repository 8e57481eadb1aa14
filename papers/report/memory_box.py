"""The Soft Memory Box: Ahn et al. 2018, Fig. 5 and Figs. 6 to 9."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.box.plot import panels as panels_of_box
from benchmarks.box.sections import SECTIONS
from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.async_sgd.plot import panels as panels_of_sgd
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    AHN,
    EQUAL,
    Claim,
    Outcome,
    Spread,
    Unmeasured,
    graded,
    percent,
    samples,
    unmeasurable,
)
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import MIB

_CLIENTS = "box-clients"
_SGD = "async-sgd"
_TWICE = 2.1  # the paper's mean of MPI's time over the box's, sequential
_OURS = "hbm shm"
_THEIRS = "MPI"
_SLEEPING = "MPI sleeping"
_HIDDEN = 1.0  # milliseconds that any wait of an iteration takes, even for hidden communication
_COMPARED = (_OURS, _THEIRS, _SLEEPING)
# (section, contender) -> the transport's name, and the contender of its bound in the same run.
_WAYS = {
    ("clients", _OURS): ("shm", "memcpy"),
    ("clients", "hbm tcp"): ("tcp, loopback", None),
    ("clients-link", "hbm tcp"): ("tcp, 1 Gbit/s", "link"),
}
_OVER_LINK = "clients-link"
_MIXED = "read and write"
_USE = 0.96  # the paper's share of one direction of the link, with reads and writes mixed
_EXPOSED = 2.0  # the paper's least ratio of exposed communication, with 32 workers


def _clients(results: Mapping[str, Result]) -> Table:
    lines: dict[tuple[str, int], dict[str, tuple[str, float]]] = {}
    for row in report.rows(results[_CLIENTS].measurements):
        for one in row.values():
            section, operation = one.of["section"], one.of["operation"]
            if (section, one.contender) in _WAYS:
                way, bound = _WAYS[section, one.contender]
                speed = f"{report.rate(SECTIONS[section], one):.3g}"
                if bound is not None:
                    speed += f" ({row[bound].median / one.median:.0%} of {bound})"
                found = lines.setdefault((way, one.of["clients"]), {})
                found[operation] = speed, one.values["smallest_share"]
    operations = next(iter(lines.values()))
    ordered = sorted(lines.items(), key=lambda line: line[0][0])
    rows = [
        [way, str(clients)]
        + [found[operation][0] for operation in operations]
        + [f"{min(share for _, share in found.values()):.2f}"]
        for (way, clients), found in ordered
    ]
    heading = ["over", "clients", *(f"{operation}, GB/s" for operation in operations)]
    return Table([*heading, "the slowest client's part of an equal share"], rows)


def _ratios(measured: Sequence[Measurement], theirs: str) -> dict[str, list[float]]:
    """Return, by scenario, the time of `theirs` over the box's for each model and number of
    workers."""
    cells: dict[tuple[str, str, int], dict[str, float]] = {}
    for one in measured:
        if one.of.get("section") == "node" and one.samples:
            row = (one.of["scenario"], one.of["model"], one.of["workers"])
            cells.setdefault(row, {})[one.contender] = one.median
    ratios: dict[str, list[float]] = {}
    for (scenario, _, _), found in cells.items():
        if found.get(_OURS) and theirs in found:
            ratios.setdefault(scenario, []).append(found[theirs] / found[_OURS])
    return ratios


def _sgd(results: Mapping[str, Result]) -> Table:
    rows = [
        [
            scenario if theirs == _THEIRS else f"{scenario}, {theirs}",
            str(len(found)),
            f"{statistics.median(found):.2f}",
            f"{statistics.fmean(found):.2f}",
            f"{min(found):.2f} to {max(found):.2f}",
            f"{sum(one >= _TWICE for one in found)} of {len(found)}",
        ]
        for theirs in (_THEIRS, _SLEEPING)
        for scenario, found in _ratios(results[_SGD].measurements, theirs).items()
    ]
    heading = [
        "scenario",
        "cells",
        "median of MPI / box",
        "mean",
        "from, to",
        f"cells with at least {_TWICE} (the paper's sequential mean)",
    ]
    return Table(heading, rows)


def _exposed(results: Mapping[str, Result]) -> dict[tuple[str, int], dict[str, float]]:
    """Return the milliseconds of exposed communication of each contender in the parallel scenario,
    by model and number of workers."""
    shown: dict[tuple[str, int], dict[str, float]] = {}
    for one in results[_SGD].measurements:
        if one.of.get("scenario") == "parallel" and one.samples:
            cell = one.of["model"], one.of["workers"]
            shown.setdefault(cell, {})[one.contender] = one.median - one.of["compute_ms"]
    return shown


def _sgd_answer(results: Mapping[str, Result]) -> list[str]:
    """Return the cells that have exposed communication."""
    return [
        f"{model} with {workers} workers: exposed communication"
        f" {', '.join(f'{found[name]:.1f}' for name in found)} ms ({', '.join(found)})."
        for (model, workers), found in _exposed(results).items()
        if max(found.values()) > _HIDDEN
    ]


def _box_panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_box(results[_CLIENTS])[0]


def _sgd_panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_sgd(results[_SGD])[0]


def _link(results: Mapping[str, Result], operation: str) -> dict[int, tuple[float, float]]:
    """Return the GB/s over the link, and their share of the link's bound, by the number of clients.

    Raises Unmeasured without figures.
    """
    found = {}
    for row in report.rows(results[_CLIENTS].measurements):
        ours, bound = row.get("hbm tcp"), row.get("link")
        if ours is None or bound is None or ours.of["operation"] != operation:
            continue
        rate = report.rate(SECTIONS[_OVER_LINK], ours)
        found[ours.of["clients"]] = rate, bound.median / ours.median
    if not found:
        raise Unmeasured(f"The record has no {operation} over the link.")
    return found


def _of_clients(results: Mapping[str, Result]) -> str:
    ours = (one for one in results[_CLIENTS].measurements if one.contender == "hbm tcp")
    return (
        "The link is TCP of 1 Gbit/s between two namespaces instead of InfiniBand;"
        f" {samples(ours)}."
    )


def _mixed(results: Mapping[str, Result]) -> Outcome:
    shares = [share for _, share in _link(results, _MIXED).values()]
    best = 2 * max(shares)  # the bound of mixed operations has both directions
    return Outcome(
        f"Half reads and half writes reach up to {percent(best)} of one direction's rate"
        f" ({percent(min(shares))} to {percent(max(shares))} of both directions).",
        graded(best >= _USE, best >= _USE / EQUAL),
        _of_clients(results),
    )


def _growth(results: Mapping[str, Result]) -> Outcome:
    reads, writes = (_link(results, operation) for operation in ("read", "write"))
    fewest, most = min(writes), max(writes)
    best = max(reads, key=lambda clients: reads[clients][0])
    peaks = reads[best][0] > EQUAL * max(reads[fewest][0], reads[most][0])
    grows = writes[most][0] > EQUAL * writes[fewest][0]
    shares = [share for found in (reads, writes) for _, share in found.values()]
    return Outcome(
        f"{fewest} clients reach {percent(reads[fewest][1])} of the link in reads and"
        f" {percent(writes[fewest][1])} in writes; with up to {most} clients the share is"
        f" {percent(min(shares))} to {percent(max(shares))}.",
        graded(peaks and grows, peaks or grows),
        "If few clients already fill the link, more of them cannot gain. A client here transfers 1"
        f" MiB at a time. {_of_clients(results)}",
    )


_BOX_CLAIMS = (
    Claim(
        AHN,
        "Fig. 5, reads and writes mixed",
        "Half reads and half writes of 2 to 32 clients reach up to 6.7 GB/s, which is 96 % of one"
        " direction of the link (7 GB/s).",
        _mixed,
        "It holds if the best number of clients reaches 96 % of one direction's rate, and in part"
        " if it reaches 87 %.",
    ),
    Claim(
        AHN,
        "Fig. 5, reads and writes apart",
        "From 2 to 32 clients, reads peak at 5.5 GB/s with 8 clients and then fall; writes grow"
        " gradually to 5.2 GB/s with 32 clients.",
        _growth,
        "It holds if reads peak between the fewest and the most clients, and writes grow, both by"
        " more than 10 %. It holds in part if one of these is so.",
    ),
)


def _peer(results: Mapping[str, Result], theirs: str) -> str:
    """Return the reason that limits a comparison with MPI, whose ranks wait or sleep."""
    measured = [one for one in results[_SGD].measurements if one.contender == theirs]
    single = sum(one.samples is not None and one.samples.n == 1 for one in measured)
    how = (
        "MPI is as in the paper, and unfair on two cores, because its ranks wait in busy loops"
        if theirs == _THEIRS
        else "MPI's ranks sleep, which is fairer. MPI's server adds on one thread, and one-sided"
        " MPI (MPI_Accumulate) was not measured"
    )
    return f"{how}; {single} of its {len(measured)} medians are of a single sample."


def _inputs(results: Mapping[str, Result]) -> Outcome:
    found = [one.of for one in results[_SGD].measurements if "compute_ms" in one.of]
    if not found:
        raise Unmeasured("The record has no model.")
    sizes = [of["bytes"] / MIB for of in found]
    times = [of["compute_ms"] for of in found]
    return unmeasurable(
        "The paper's times are of a Titan X, and no GPU computes here.",
        f"The emulation takes these sizes ({min(sizes):.0f} to {max(sizes):.0f} MiB), and sleeps"
        f" for these times ({min(times):.0f} to {max(times):.0f} ms).",
    )


def _sequential(results: Mapping[str, Result], who: str) -> dict[str, dict[int, float]]:
    """Return the milliseconds of communication, by model and number of workers.

    Raises Unmeasured without figures.
    """
    found: dict[str, dict[int, float]] = {}
    for one in results[_SGD].measurements:
        if (one.of.get("scenario"), one.contender) == ("sequential", who) and one.samples:
            found.setdefault(one.of["model"], {})[one.of["workers"]] = one.median
    if not found:
        raise Unmeasured(f"The record has no communication of {who}.")
    return found


def _over_nets(results: Mapping[str, Result], who: str) -> dict[int, float]:
    """Return the time of the largest net over the smallest net's, by the number of workers."""
    sizes = {one.of["model"]: one.of["bytes"] for one in results[_SGD].measurements}
    smallest = min(sizes, key=sizes.__getitem__)
    largest = max(sizes, key=sizes.__getitem__)
    times = _sequential(results, who)
    return {
        count: ms / times[smallest][count]
        for count, ms in times[largest].items()
        if count in times[smallest]
    }


def _trend(results: Mapping[str, Result]) -> Outcome:
    ours, theirs = (
        {model: times[max(times)] / times[min(times)] for model, times in found.items()}
        for found in (_sequential(results, _OURS), _sequential(results, _THEIRS))
    )
    faster = sum(theirs[model] > EQUAL * ours[model] for model in theirs.keys() & ours.keys())
    workers = sorted({count for times in _sequential(results, _OURS).values() for count in times})
    span = Spread.of(theirs.values(), _THEIRS).span, Spread.of(ours.values(), _OURS).span
    wide, narrow = (_over_nets(results, who) for who in (_THEIRS, _OURS))
    wider = all(wide[count] > EQUAL * narrow[count] for count in wide.keys() & narrow.keys())
    nets = Spread.of(wide.values(), _THEIRS).span, Spread.of(narrow.values(), _OURS).span
    return Outcome(
        f"With {workers[-1]} workers MPI takes {span[0]} times its time with {workers[0]}, and the"
        f" box {span[1]} times; MPI's time grows faster with {faster} of {len(ours)} nets. With the"
        f" largest net MPI takes {nets[0]} times its time with the smallest net, and the box"
        f" {nets[1]} times.",
        graded(faster == len(ours) and wider, faster > 0),
        _peer(results, _THEIRS),
    )


def _ratio(results: Mapping[str, Result], scenario: str, theirs: str) -> list[float]:
    return _ratios(results[_SGD].measurements, theirs).get(scenario, [])


def _communication(theirs: str, least: float) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that judges the sequential scenario against a peer, whose mean time is at
    `least` a multiple of the box's."""

    def outcome(results: Mapping[str, Result]) -> Outcome:
        ratios = _ratio(results, "sequential", theirs)
        ratio = Spread.of(ratios, f"{theirs} and the box in sequence")
        clear = sum(one > EQUAL for one in ratios)
        mean = statistics.fmean(ratios)
        return Outcome(
            f"{theirs} takes {mean:.2f} times the box's time in the mean, and {ratio.median:.2f}"
            f" times in the median ({ratio.span} over {ratio.cells} cells). The box is more than"
            f" 10 % faster in {clear} cells.",
            graded(clear == len(ratios) and mean >= least, ratio.median > EQUAL),
            _peer(results, theirs),
        )

    return outcome


def _hidden(results: Mapping[str, Result]) -> Outcome:
    cells = [found for found in _exposed(results).values() if {_OURS, _THEIRS} <= set(found)]
    if not cells:
        raise Unmeasured("The record has no parallel scenario of both.")
    ours, theirs = (sum(found[name] > _HIDDEN for found in cells) for name in (_OURS, _THEIRS))
    worse = any(found[_OURS] > max(_HIDDEN, found[_THEIRS]) for found in cells)
    return Outcome(
        f"More than {_HIDDEN:g} ms of communication is exposed in {ours} of {len(cells)} cells with"
        f" the box, and in {theirs} with MPI.",
        graded(ours < theirs and not worse, ours < theirs),
        _peer(results, _THEIRS),
    )


def _iteration(theirs: str) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that judges the iterations of the parallel scenario against a peer."""

    def outcome(results: Mapping[str, Result]) -> Outcome:
        ratios = _ratio(results, "parallel", theirs)
        ratio = Spread.of(ratios, f"{theirs} and the box in parallel")
        clear = sum(one > EQUAL for one in ratios)
        return Outcome(
            f"An iteration with {theirs} takes up to {ratio.most:.2f} times as long, and"
            f" {ratio.median:.2f} times in the median. The box is more than 10 % faster in {clear}"
            f" of {ratio.cells} cells.",
            graded(clear == len(ratios), clear > 0),
            _peer(results, theirs),
        )

    return outcome


def _exposed_ratio(theirs: str, least: float) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that judges whether a peer exposes at `least` a multiple of the
    communication that the box exposes."""

    def outcome(results: Mapping[str, Result]) -> Outcome:
        found = _exposed(results)
        ratios = [
            times[theirs] / times[_OURS]
            for times in found.values()
            if theirs in times and times.get(_OURS, 0.0) > _HIDDEN
        ]
        ratio = Spread.of(ratios, f"exposed communication of {theirs} and the box")
        most = max(workers for _, workers in found)
        return Outcome(
            f"With up to {most} workers, {theirs} exposes {ratio.times('the communication')} that"
            f" the box exposes. In the other cells the box exposes at most {_HIDDEN:g} ms.",
            graded(ratio.least >= least, ratio.median >= least),
            f"The paper has up to 32 workers. {_peer(results, theirs)}",
        )

    return outcome


_FASTER_RULE = (
    "It holds if the box is more than 10 % faster in all cells, and in part if it is in the median."
)
_PARALLEL_RULE = (
    "It holds if an iteration with the box is more than 10 % faster in all cells, and in part if it"
    " is in some."
)
_BETTER = "The paper has no MPI with sleeping ranks; our claim is that"
_SGD_CLAIMS = (
    Claim(
        AHN,
        "Table 2",
        "Six nets have parameters of 51 to 528 MB, and compute for 189 to 445 ms on a GPU.",
        _inputs,
    ),
    Claim(
        AHN,
        "Fig. 6",
        "With larger nets and more workers, MPI's communication time grows rapidly, and the box's"
        " gradually.",
        _trend,
        "It holds if MPI's time grows more than 1.1 times as much as the box's, over the workers"
        " with all nets, and over the nets with all numbers of workers. It holds in part if it does"
        " so over the workers with some nets.",
    ),
    Claim(
        AHN,
        "Fig. 7; abstract",
        "With 2 to 32 workers and computation and communication in sequence, communication by MPI"
        " takes 1.1 to 4.2 times as long as with the box, and 2.1 times on average.",
        _communication(_THEIRS, _TWICE),
        "It holds if the box is more than 10 % faster in all cells and MPI's mean is at least 2.1"
        " times the box's time, and in part if the box is more than 10 % faster in the median.",
    ),
    Claim(
        AHN,
        "Fig. 7, against MPI that sleeps",
        f"{_BETTER} communication is also faster than by MPI whose ranks sleep while they wait.",
        _communication(_SLEEPING, EQUAL),
        _FASTER_RULE,
    ),
    Claim(
        AHN,
        "Fig. 8",
        "In parallel, communication that computation does not hide is a smaller part of an"
        " iteration with the box than with MPI (bars without numbers).",
        _hidden,
        "It holds if the box exposes communication in fewer cells, and in no cell more than MPI."
        " It holds in part if there are only fewer cells.",
    ),
    Claim(
        AHN,
        "Fig. 9, an iteration",
        "In parallel, the average time of an iteration is up to 3.5 times as long with MPI. The box"
        " is much better for all nets and numbers of workers (2 to 32).",
        _iteration(_THEIRS),
        _PARALLEL_RULE,
    ),
    Claim(
        AHN,
        "Fig. 9, an iteration, against MPI that sleeps",
        f"{_BETTER} an iteration is also faster than with MPI whose ranks sleep.",
        _iteration(_SLEEPING),
        _PARALLEL_RULE,
    ),
    Claim(
        AHN,
        "Fig. 9, exposed communication; abstract",
        "MPI exposes 2 to 7 times as much communication as the box: 7 times with Inception_v1 and"
        " 32 workers (323 and 45 ms), 5.2 times with Resnet_50, 4.8 times with"
        " Inception_resnet_v2, and 2.0 times with Resnet_152 and VGG16. The box exposes none with"
        " Inception_v1 and up to 24 workers, and none with Inception_v3. There MPI's communication"
        " takes 2.3 times as long as the computation, with 32 workers.",
        _exposed_ratio(_THEIRS, _EXPOSED),
        "It holds if the ratio is at least 2.0 in all cells in which the box exposes more than 1"
        " ms, and in part if it is in the median.",
    ),
    Claim(
        AHN,
        "Fig. 9, exposed communication, against MPI that sleeps",
        f"{_BETTER} less communication is exposed than with MPI whose ranks sleep.",
        _exposed_ratio(_SLEEPING, EQUAL),
        "It holds if the ratio is at least 1.1 in all cells in which the box exposes more than 1"
        " ms, and in part if it is in the median.",
    ),
)


CLIENTS = Experiment(
    name=_CLIENTS,
    figures="Fig. 5",
    label=Label.MEASURED,
    differs=(
        "Clients run on the box's machine, over shared memory or tcp, and over an emulated link of"
        " 1 Gbit/s between two network namespaces. They transfer 1 MiB at a time for some seconds."
        " Each client of the paper transfers 1 GB, over InfiniBand FDR. A mix of half reads and"
        " half writes may use both directions of the link, so its share refers to twice the link's"
        " rate. The paper's 96 % refers to one direction. The bound memcpy is a copy between the"
        " same memory in the same processes."
    ),
    claims=_BOX_CLAIMS,
    runs=(
        Run(
            _CLIENTS,
            "benchmarks.box",
            ["--sections=clients,clients-link"],
            ["--sections=clients,clients-link", "--clients=2,4", "--quick"],
        ),
    ),
    table=_clients,
    panels=_box_panels,
)

ASYNC_SGD = Experiment(
    name=_SGD,
    figures="Figs. 6 to 9, Table 2",
    label=Label.EMULATED,
    differs=(
        "All processes are on one machine of two cores. The box and MPI use its memory instead of"
        " InfiniBand. There are 2, 4 and 8 workers; the paper has 2 to 32. As in the paper,"
        " computation is a sleep. Exposed communication is the time of an iteration beyond its"
        " computation. The box is hbm shm, a box over shared memory. A cell is a scenario with one"
        " model and one number of workers."
        " Cells of the scenario sequential compare the time of communication, and cells of the"
        " scenario parallel the time of an iteration. MPI's server adds on one thread. MPI's ranks"
        " wait in a busy loop, which takes processor time from other ranks. With the contender MPI"
        " sleeping, a rank asks the server for a turn, and sleeps until the turn comes. This is"
        " fairer if ranks outnumber the cores."
    ),
    claims=_SGD_CLAIMS,
    runs=(
        Run(
            _SGD,
            "papers.async_sgd",
            ["--sections=node", f"--contenders={','.join(_COMPARED)}", "--rounds=3"],
            ["--sections=node", f"--contenders={','.join(_COMPARED)}", "--workers=2", "--quick"],
        ),
    ),
    table=_sgd,
    panels=_sgd_panels,
    answer=_sgd_answer,
)
