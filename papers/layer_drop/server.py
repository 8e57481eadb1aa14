"""Section server: a dedicated parameter server behind a link, and four workers.

It follows Table 1 of the paper, and Fig. 1 with other numbers of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.verdict import JudgedSection, Verdict
from papers.layer_drop.cluster import Cluster, one_host, two_hosts
from papers.layer_drop.contenders import BFLOAT16, RATIO, dropping
from papers.layer_drop.plan import Plan, link
from papers.layer_drop.rows import cases, in_proportion, row
from papers.layer_drop.server_turns import Turn, boxed, synchronous
from papers.layer_drop.table import tables
from torch_hbmcomm.bench.result import Findings, Measurement

NAME = "server"
_ABOUT = (
    "a parameter server behind the link and 4 workers, with gradients of ResNet-50's sizes; "
    "compute: time of a thread, on one host; communication: the additional time of an iteration; "
    "the cases with everything sent compare other numbers of workers with 4"
)
_ROLE = "papers.layer_drop.server_rank"
_WORKERS = 4
_ON_ONE_HOST = 8  # most steps of each contender on one host
_ALL = "all is sent"
_BOX = ", memory box"
EVERYTHING = f", {_ALL}"  # ends the cases that compare numbers of workers

_PAPER_NAMES = ("worker_ms", "server_ms", "communication_ms", "iteration_ms")
_PAPER = {
    "1 Gbit/s": ((388, 73, 3457, 3918), (408, 85, 182, 675)),
    "56 Gbit/s": ((222, 48, 1951, 2222), (230, 60, 375, 665)),
}
"""Table 1 of Lee et al. (2020), without and with dropping: an iteration of ResNet-50 on GPUs, with
4 workers at 1 Gbit/s and 8 at 56 Gbit/s. The paper does not state the dropped share."""

_SAVED = 0.95
_SERVERS_EXTRA = 0.05


def _measure(plan: Plan, findings: Findings) -> None:
    contenders: dict[str, dict[str, Any] | None] = {_ALL: None}
    contenders |= {dropping(ratio).name: {"ratio": ratio} for ratio in plan.ratios}
    alone: dict[str, Turn] = {}
    with one_host(_ROLE, 1 + _WORKERS, width=plan.width) as host:
        for name, terms in contenders.items():
            findings.progress(f"{NAME}, on one host: {name}")
            alone[name] = synchronous(host, terms, min(_ON_ONE_HOST, plan.server_steps))
    of_links: dict[int | None, Turn] = {}
    for megabits in plan.megabits:
        case = link(megabits)
        with two_hosts(_ROLE, _nodes(_WORKERS), megabits, width=plan.width) as hosts:
            found: dict[str, Turn] = {}
            for name, terms in contenders.items():
                findings.progress(f"{NAME}, {case}: {name}")
                found[name] = synchronous(hosts, terms, plan.server_steps_of(terms))
            findings.add(_rows(case, found, alone))
            findings.add(_of_paper(case, megabits is not None))
            findings.add(_boxed(case + _BOX, hosts, plan, findings.progress))
        of_links[megabits] = found[_ALL]
    _measure_workers(plan, findings, of_links, alone[_ALL])


def _measure_workers(
    plan: Plan, findings: Findings, of_links: Mapping[int | None, Turn], of_host: Turn
) -> None:
    """Send everything with other numbers of workers, and compare them with 4 workers.

    of_links, of_host: the turns of 4 workers over each link, and on one host.
    """
    steps = plan.server_steps_of(None)
    found = {megabits: {_WORKERS: turn} for megabits, turn in of_links.items()}
    alone = {_WORKERS: of_host}
    for workers in plan.more_workers:
        findings.progress(f"{NAME}, on one host: {_count(workers)}")
        with one_host(_ROLE, 1 + workers, width=plan.width) as host:
            alone[workers] = synchronous(host, None, min(_ON_ONE_HOST, plan.server_steps))
        for megabits, turns in found.items():
            findings.progress(f"{NAME}, {link(megabits)}: {_count(workers)}")
            with two_hosts(_ROLE, _nodes(workers), megabits, width=plan.width) as hosts:
                turns[workers] = synchronous(hosts, None, steps)
    on_host = {_count(workers): turn for workers, turn in alone.items()}
    for megabits, turns in found.items():
        named = {_count(workers): turns[workers] for workers in sorted(turns)}
        findings.add(_rows(link(megabits) + EVERYTHING, named, on_host, _count(_WORKERS)))


def _nodes(workers: int) -> list[int]:
    """Return the node of each rank: the server is at one end of the link, all workers at the other
    end."""
    return [0] + workers * [1]


def _count(workers: int) -> str:
    return f"{workers} workers"


def _rows(
    case: str, found: Mapping[str, Turn], alone: Mapping[str, Turn], base: str = _ALL
) -> Iterator[Measurement]:
    """Yield the rows of a case. base: the contender that the shares are of."""
    plain = found[base]
    plain_communication = plain.iteration - alone[base].iteration
    for name, turn in found.items():
        communication = turn.iteration - alone[name].iteration
        values = {
            "worker_ms": alone[name].worker,
            "server_ms": alone[name].server,
            "communication_ms": communication,
            "time_share": communication / plain_communication,
        }
        yield row(NAME, case, name, values | _values(turn, plain), turn.iterations)


def _of_paper(case: str, limited: bool) -> Iterator[Measurement]:
    """Yield the rows of the paper's table for a case whose link has a rate (`limited`) or none."""
    network = "1 Gbit/s" if limited else "56 Gbit/s"
    sent, dropped = _PAPER[network]
    for who, found in ((_ALL, sent), ("dropped", dropped)):
        values = dict(zip(_PAPER_NAMES, map(float, found), strict=True))
        values["time_share"] = found[2] / sent[2]
        yield row(NAME, case, f"paper, {network}: {who}", values)


def _boxed(
    case: str, hosts: Cluster, plan: Plan, progress: Callable[[str], None]
) -> Iterator[Measurement]:
    contenders: dict[str, dict[str, Any]] = {
        _ALL: {"terms": None, "transfer": None},
        BFLOAT16.name: {"terms": None, "transfer": "bfloat16"},
        dropping(RATIO).name: {"terms": {"ratio": RATIO}, "transfer": None},
    }
    found: dict[str, Turn] = {}
    for name, options in contenders.items():
        progress(f"{NAME}, {case}: {name}")
        steps = plan.server_steps_of(options["terms"])
        found[name] = boxed(hosts, steps=-(-steps // 2), **options)
    for name, turn in found.items():
        yield row(NAME, case, name, _values(turn, found[_ALL]), turn.iterations)


def _values(turn: Turn, plain: Turn) -> dict[str, float]:
    return {
        "iteration_ms": turn.iteration,
        "iteration_share": turn.iteration / plain.iteration,
        "up_mb": turn.up,
        "down_mb": turn.down,
        "bytes_share": (turn.up + turn.down) / (plain.up + plain.down),
    }


def _verdicts(rows: Sequence[Measurement]) -> Iterator[Verdict]:
    for case, found in cases(rows).items():
        if case.endswith((_BOX, EVERYTHING)):
            continue
        ours = [one for one in found.values() if "bytes_share" in one.values]
        yield _communication_saved(case, ours)
        yield _servers_extra(case, ours)
        if case != link(None):
            yield from (in_proportion(one) for one in ours if one.contender != _ALL)


def _communication_saved(case: str, rows: Sequence[Measurement]) -> Verdict:
    best = min(rows, key=lambda one: one.values["time_share"])
    change = best.values["time_share"] - 1
    text = f"{case}: communication {change:+.1%} at {best.contender} (≤ {-_SAVED:+.0%})"
    return Verdict(text, change <= -_SAVED)


def _servers_extra(case: str, rows: Sequence[Measurement]) -> Verdict:
    plain, *dropped = rows
    worst = max(dropped, key=lambda one: one.values["server_ms"])
    change = worst.values["server_ms"] / plain.values["server_ms"] - 1
    text = (
        f"{case}: server's compute {change:+.1%} at {worst.contender} (≤ {_SERVERS_EXTRA:+.0%}; "
        "paper: +16 to +25%)"
    )
    return Verdict(text, change <= _SERVERS_EXTRA)


SERVER = JudgedSection(
    NAME, _ABOUT, _measure, render=partial(tables, _ABOUT), verdicts=_verdicts, plotted=True
)
