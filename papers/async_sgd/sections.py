"""The emulation: server and workers on this machine, or with a slow link between them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType

from benchmarks.namespaces import PAYLOAD, NoNamespaces, two_nodes
from benchmarks.verdict import JudgedSection, Row, line
from papers.async_sgd import contenders, goals
from papers.async_sgd.contenders import Place
from papers.async_sgd.emulation import Emulation, chosen
from papers.async_sgd.goals import Goal, not_hidden_ms
from papers.async_sgd.plan import Plan
from papers.async_sgd.workload import MODELS, Model
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import format_time
from torch_hbmcomm.bench.result import Findings, Measurement, Unavailable

_LINK_MODELS = ["Inception_v1"]  # an iteration of larger models takes seconds
_LINK_CONTENDERS = [contenders.TCP, contenders.MPI_TCP, contenders.RPC]
_TITLES = {
    "sequential": "communication in an iteration, after the computation",
    "parallel": "an iteration whose communication overlaps the next one's computation, and in "
    "brackets its exposed communication",
}
_RATIOS = (
    ("MPI", "hbm shm"),
    ("MPI sleeping", "hbm shm"),
    ("MPI", "hbm shm zero-copy"),
    ("MPI tcp", "hbm tcp"),
)


def _node(plan: Plan, findings: Findings) -> None:
    taking_part = chosen(plan, list(contenders.CONTENDERS.values()))
    with Emulation("node", plan, findings) as emulation:
        emulation.start(taking_part, Place())
        for model in plan.chosen(list(MODELS)):
            for workers in sorted(plan.workers):
                emulation.measure(model, workers)


def _link(plan: Plan, findings: Findings) -> None:
    taking_part = chosen(plan, [contenders.CONTENDERS[name] for name in _LINK_CONTENDERS])
    try:
        with (
            two_nodes(f"{plan.megabits}mbit") as (there, here),
            Emulation("link", plan, findings) as emulation,
        ):
            emulation.start(taking_part, Place(there, here))
            models = plan.chosen(_LINK_MODELS)
            emulation.check_way(models[0], there)
            for model in models:
                for workers in sorted(plan.workers):
                    emulation.measure(model, workers)
                    findings.add(
                        emulation.measurement(scenario, model, workers, goals.LINK, [bound])
                        for scenario, bound in _bounds(plan, model, workers).items()
                    )
    except NoNamespaces as error:
        raise Unavailable(str(error)) from error


def _bounds(plan: Plan, model: Model, workers: int) -> dict[str, float]:
    """Return, by scenario, the least milliseconds that the link's rate allows.

    In every iteration the link carries all gradients one way and all weights the other way.
    """
    one = model.bytes / (plan.megabits / 8 * 1e3 * PAYLOAD)
    compute = model.compute * 1e3
    bounds = {
        "sequential": max(one, workers * one - compute),
        "parallel": max(compute, workers * one),
    }
    return {scenario: bounds[scenario] for scenario in plan.scenarios}


def _render(
    about: str, all_goals: Mapping[str, Sequence[Goal]], found: Sequence[Measurement]
) -> Iterator[RenderableType]:
    """Yield a table for each scenario, with its verdicts."""
    for scenario, wanted in all_goals.items():
        own = [one for one in found if one.of["scenario"] == scenario]
        if own:
            yield _table(scenario, about, own)
            verdicts = [goal(report.rows(own)) for goal in wanted]
            yield from (line(verdict) for verdict in verdicts if verdict is not None)


def _table(scenario: str, about: str, found: Sequence[Measurement]) -> RenderableType:
    took_part = {one.contender for one in found}
    ratios = [pair for pair in _RATIOS if took_part.issuperset(pair)]
    return report.compared(
        f"{found[0].of['section']}, {scenario}: {about}; {_TITLES[scenario]}",
        found,
        {
            "model": lambda one: one.of["model"],
            "size": report.size,
            "compute": lambda one: format_time(one.of["compute_ms"] * 1e3),
            "workers": lambda one: str(one.of["workers"]),
        },
        _entry,
        [*contenders.CONTENDERS, goals.LINK],
        {f"{rival} /\n{subject}": partial(_ratio, rival, subject) for rival, subject in ratios}
        if scenario == "sequential"
        else None,
    )


def _entry(row: Row, found: Measurement) -> str:
    """Format the median, and exposed communication (parallel) or minimum and mean (sequential)."""
    time = format_time(found.median * 1e3)
    if found.of["scenario"] == "parallel":
        over = not_hidden_ms(found)
        return f"{time} ({format_time(over * 1e3) if over else 'none'})"
    if found.summary.n == 1:
        return time
    return f"{time}\nmin {format_time(found.minimum * 1e3)}\nmean {format_time(found.mean * 1e3)}"


def _ratio(rival: str, subject: str, row: Row) -> str:
    """Format the ratio of the medians."""
    if rival not in row or subject not in row:
        return "-"
    return f"{row[rival].median / row[subject].median:.2f}"


def _section(
    name: str, about: str, measure: Any, sequential: Sequence[Goal], parallel: Sequence[Goal]
) -> JudgedSection:
    """Make a section, with the goals of each scenario."""
    all_goals = {"sequential": sequential, "parallel": parallel}
    return JudgedSection(
        name, about, measure, render=partial(_render, about, all_goals), plotted=True
    )


NODE = _section(
    "node",
    "server and workers on this machine",
    _node,
    sequential=[
        goals.faster(contenders.MPI, contenders.ZERO_COPY, 4),
        goals.faster(contenders.MPI, contenders.PLAIN, 2.3),
        goals.faster(contenders.RPC, contenders.ZERO_COPY),
        goals.faster(contenders.MPI_TCP, contenders.TCP, 2.1),
    ],
    parallel=[
        goals.better_hidden(contenders.MPI, contenders.ZERO_COPY, 7),
        goals.better_hidden(contenders.MPI_TCP, contenders.TCP, 7),
    ],
)

LINK = _section(
    "link",
    "the server at one end of a link with a limited rate, the workers at the other; its bound",
    _link,
    sequential=[
        goals.faster_where_the_link_is_not_the_bound(contenders.MPI_TCP, contenders.TCP, 2.1),
        goals.faster_where_the_link_is_the_bound(contenders.MPI_TCP, contenders.TCP, 1),
        goals.faster(contenders.RPC, contenders.TCP),
    ],
    parallel=[goals.better_hidden(contenders.MPI_TCP, contenders.TCP, 7)],
)
