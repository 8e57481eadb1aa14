"""Kinds of memory and modes of the chip: Woo et al. 2020, Tables 1 to 4, 6 and 7, Fig. 11."""

from __future__ import annotations

from collections.abc import Mapping

from guest.ranks import COLLECTIVES, WHATS

from benchmarks.markdown import Table
from papers.placement.__main__ import MODES
from papers.placement.__main__ import PLACEMENT as PLACED
from papers.report.experiment import Experiment, Label, Run
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import format_bytes

_PAPER = "Woo, Choi, Lee 2020, MPI for Python in MCDRAM"
_RUN = "placement"
_MODES = "memory-modes"
# The paper's seconds, Python buffers in MCDRAM, 68 processes (Tables 6 and 7): of broadcast, gather
# and allreduce.
_SECONDS = {
    ("quadrant", "host"): (0.525, 0.301, 2.168),
    ("quadrant", "4 containers"): (2.398, 1.538, 5.342),
    ("SNC-4", "host"): (0.553, 0.297, 2.421),
    ("SNC-4", "4 containers"): (2.456, 1.531, 5.361),
}
# DDR4 in percent of MCDRAM: of Python buffers, of C, at the numbers of processes that are best for
# MCDRAM (Tables 1 and 2, 3 and 4).
_PERCENT = {
    ("quadrant", "host"): ((545, 159, 262), (271, 103, 201)),
    ("quadrant", "4 containers"): ((202, 131, 217), (105, 108, 102)),
}
_SPEEDS = (
    ("Tables 1 to 4, flat mode", "two kinds of memory", "the section placement"),
    ("Figs. 8 to 10, cache mode", "a memory-side cache", "the section memory-modes"),
    ("Fig. 11, Tables 6 and 7", "quarters of a chip with distances", "the section placement"),
)


def paper(cluster: str, place: str, memory: str, collective: str) -> str:
    """Return what the paper has of a line of the table."""
    index = COLLECTIVES.index(collective)
    if memory == "HBM":
        return f"{_SECONDS[cluster, place][index]} s"
    if (cluster, place) not in _PERCENT:
        return "a figure without numbers"
    buffer, c = (found[index] for found in _PERCENT[cluster, place])
    return f"{buffer} % of MCDRAM's time (C: {c} %)"


def _share(one: Measurement, name: str) -> str:
    return f"{one.values[name]:.1%}" if name in one.values else "-"


def _table(results: Mapping[str, Result]) -> Table:
    lines: dict[tuple[str, str, str, str], dict[str, Measurement]] = {}
    for one in results[_RUN].measurements:
        names = ("cluster", "place", "memory", "collective")
        cluster, place, memory, collective = (str(one.of[name]) for name in names)
        lines.setdefault((cluster, place, memory, collective), {})[one.contender] = one
    rows = [
        list(line)
        + [f"{format_bytes(int(found[what].values['bytes']))}: {_share(found[what], 'share')}"
           for what in WHATS]
        + [", ".join(_share(found[what], "own_share") for what in WHATS)]
        + [paper(*line)]
        for line, found in lines.items()
    ]  # fmt: skip
    heading = ["cluster mode", "ranks", "memory asked", "collective"]
    heading += ["tensors there", "hbm's segments there", "MPI's buffers there"]
    heading += ["of each, on the rank's own node", "the paper"]
    return Table(heading, rows)


def _modes_table(results: Mapping[str, Result]) -> Table:
    rows = [
        [str(one.of["guest"]), str(one.of["mode"])]
        + [str(int(one.values[name])) for name in ("nodes", "hbm_nodes")]
        + [str(one.of["found_by"])]
        for one in results[_MODES].measurements
    ]
    return Table(["guest", "mode by hbmcomm info", "nodes", "of HBM", "found by"], rows)


def _run(name: str, section: str) -> Run:
    arguments = [f"--sections={section}"]
    return Run(name, "papers.placement", arguments, arguments)


PLACEMENT = Experiment(
    name="placement",
    paper=_PAPER,
    figures="Fig. 11, Tables 1 to 4, 6 and 7: where memory lies",
    label=Label.EMULATED,
    differs=(
        "4 ranks with tensors of 4 MiB in a virtual machine that has nodes of HBM, and in SNC-4"
        " four quarters, instead of 68 processes with 256 MB (gather 16 MB) on a Xeon Phi. Where a"
        " page lies is real there, by the kernel's word (move_pages), but all nodes are the host's"
        " one memory: no speed follows, and no time was taken. Four containers are four processes"
        " bound to a node each (HBMCOMM_BIND=numa): to the quarters in SNC-4, and all to the one"
        " that has processors in quadrant mode, where the shares on the own node say nothing. Those"
        " on the host are bound to nothing here, and to cores in the paper's SNC-4. The shares are"
        " of what lies on the memory that was asked for; a line's segments and MPI's buffers are"
        " those of the collectives before it, too."
    ),
    found=(
        "Its seconds are of Python buffers in MCDRAM with 68 processes; its percentages are at the"
        " number of processes where MCDRAM gains most.",
    ),
    runs=(_run(_RUN, PLACED),),
    table=_table,
    panels=lambda results: (),
)

MEMORY_MODES = Experiment(
    name=_MODES,
    paper=_PAPER,
    figures="Figs. 8 to 10, cache mode",
    label=Label.EMULATED,
    differs=(
        "Virtual machines whose firmware tells of a memory-side cache in front of DDR, or of that"
        " and a node of HBM (hybrid): what hbm sees of the modes is real, the cache is not,"
        " so no speed follows. In cache mode there is no node to bind to, and hbm allocates DDR,"
        " which the cache stands in front of (docs/memory.md)."
    ),
    found=(
        "With MCDRAM as a cache, buffers are up to 88 % (broadcast), 13 % (gather) and 110 %"
        " (allreduce) faster than in DDR4 in flat mode, and slower than in MCDRAM in flat mode; but"
        " an allreduce of objects is up to 76 % faster than there.",
    ),
    runs=(_run(_MODES, MODES),),
    table=_modes_table,
    panels=lambda results: (),
)

MEMORY_SPEED = Experiment(
    name="memory-speed",
    paper=_PAPER,
    figures="Tables 1 to 4, 6 and 7, Figs. 8 to 11: how fast a kind of memory is",
    label=Label.NOT_MEASURABLE,
    differs=(
        "Neither HBM nor a chip in SNC-4 is at hand, and all nodes of a virtual machine are one"
        " memory."
    ),
    found=(
        "In flat mode MCDRAM is faster than DDR4 throughout, by only 2 to 8 % in C in four"
        " containers; SNC-4 takes from 1 % less (gather) to 12 % more time (allreduce) than"
        " quadrant mode.",
    ),
    runs=(),
    table=lambda results: Table(("figure", "what it takes", "what stands for it"), _SPEEDS),
    panels=lambda results: (),
)
