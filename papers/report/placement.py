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
# The paper's seconds of broadcast, gather and allreduce, with Python buffers in MCDRAM and 68
# processes (Tables 6 and 7).
_SECONDS = {
    ("quadrant", "host"): (0.525, 0.301, 2.168),
    ("quadrant", "4 containers"): (2.398, 1.538, 5.342),
    ("SNC-4", "host"): (0.553, 0.297, 2.421),
    ("SNC-4", "4 containers"): (2.456, 1.531, 5.361),
}
# The time with DDR4 in percent of MCDRAM, for Python buffers and for C, at the numbers of processes
# that are best for MCDRAM (Tables 1 and 2, 3 and 4).
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
    """Return the paper's figures for a line of the table."""
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
    heading = ["cluster mode", "ranks", "requested memory", "collective"]
    heading += ["tensors there", "hbm's segments there", "MPI's buffers there"]
    heading += ["of these three, the part on the rank's own node", "the paper"]
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
    figures="Fig. 11, Tables 1 to 4, 6 and 7: placement of memory",
    label=Label.EMULATED,
    differs=(
        "4 ranks with tensors of 4 MiB run in a virtual machine that has nodes of HBM. In the mode"
        " SNC-4 the machine has four quarters. The paper has 68 processes with 256 MB (gather 16"
        " MB) on a Xeon Phi. The kernel reports the real node of each page (move_pages), but all"
        " nodes are in the host's only memory. So no times were measured. Four processes that are"
        " bound to a node each (HBMCOMM_BIND=numa) emulate four containers. In SNC-4 these nodes"
        " are the quarters. In quadrant mode all processes are bound to the only node with"
        " processors, so there the part on a rank's own node says nothing. Processes on the host"
        " are not bound here; the paper binds them to cores in SNC-4. A share is the part of the"
        " memory that is of the requested kind. The segments and MPI's buffers of a line include"
        " memory of earlier collectives."
    ),
    found=(
        "In the last column, seconds are of Python buffers in MCDRAM with 68 processes. Percentages"
        " are for the number of processes with which MCDRAM gains most.",
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
        "The virtual machines' firmware describes a memory-side cache in front of DDR, and in"
        " hybrid mode also a node of HBM. hbm's detection is real, but the cache is not, so no"
        " times were measured. Cache mode has no node to bind to. There hbm allocates DDR, behind"
        " the cache (docs/memory.md)."
    ),
    found=(
        "With MCDRAM as a cache, buffers are up to 88 % (broadcast), 13 % (gather) and 110 %"
        " (allreduce) faster than in DDR4 in flat mode. They are slower than in MCDRAM in flat"
        " mode. Only an allreduce of objects is faster with the cache than in MCDRAM in flat mode,"
        " by up to 76 %.",
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
        "No machine with HBM or with a chip in SNC-4 is available, and all nodes of a virtual"
        " machine are in one memory."
    ),
    found=(
        "In flat mode MCDRAM is always faster than DDR4, but only by 2 to 8 % in C in four"
        " containers. Compared with quadrant mode, SNC-4 takes 1 % less time (gather) to 12 % more"
        " time (allreduce).",
    ),
    runs=(),
    table=lambda results: Table(("figure", "needed hardware", "substitute here"), _SPEEDS),
    panels=lambda results: (),
)
