"""Kinds of memory and modes of the chip: Woo et al. 2020, Tables 1 to 4, 6 and 7, Fig. 11."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from guest.ranks import COLLECTIVES, WHATS

from benchmarks.markdown import Table
from papers.placement.__main__ import MODES
from papers.placement.__main__ import PLACEMENT as PLACED
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    WOO,
    Claim,
    Outcome,
    Unmeasured,
    Verdict,
    graded,
    unmeasurable,
)
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import format_bytes

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
    ("Tables 1 to 4, Figs. 8 to 10, flat mode", "two kinds of memory", "the section placement"),
    ("Figs. 8 to 10, cache mode", "a memory-side cache", "the section memory-modes"),
    ("Fig. 11, Tables 6 and 7", "quarters of a chip with distances", "the section placement"),
)


def paper(cluster: str, place: str, memory: str, collective: str) -> str:
    """Return the paper's figures for a line of the table."""
    index = COLLECTIVES.index(collective)
    if memory == "HBM":
        return f"{_SECONDS[cluster, place][index]} s"
    if (cluster, place) not in _PERCENT:
        return "Fig. 11, without numbers"
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


def _placed(shares: Iterable[float], name: str) -> tuple[str, Verdict]:
    """Return the number of shares that are whole, and the verdict on a placement.

    Raises Unmeasured, with the `name` of the shares, without any.
    """
    found = list(shares)
    if not found:
        raise Unmeasured(f"The record has no {name}.")
    whole = sum(share == 1 for share in found)
    return f"{whole} of {len(found)}", graded(whole == len(found), whole > 0)


_PLACED_RULE = "It holds if all of these are placed so, and in part if some are."
_IN_A_GUEST = (
    "The kernel reports the node of each page, but all nodes are in one memory, so this says"
    " nothing about speed."
)


def _requested(results: Mapping[str, Result]) -> Outcome:
    found = (one.values["share"] for one in results[_RUN].measurements)
    count, verdict = _placed(found, "memory of a requested kind")
    return Outcome(
        f"{count} allocations (tensors, hbm's segments, MPI's buffers) have all their bytes in the"
        " requested memory, DDR or HBM.",
        verdict,
        _IN_A_GUEST,
    )


def _own_quarter(results: Mapping[str, Result]) -> Outcome:
    found = (
        one.values["own_share"]
        for one in results[_RUN].measurements
        if one.of["cluster"] == "SNC-4" and "own_share" in one.values
    )
    count, verdict = _placed(found, "memory of ranks that are bound in SNC-4")
    return Outcome(
        f"{count} allocations of ranks that are bound to a quarter each have all their bytes on the"
        " rank's own node.",
        verdict,
        _IN_A_GUEST,
    )


def _modes(results: Mapping[str, Result]) -> Outcome:
    found = results[_MODES].measurements
    named = [one for one in found if one.of["mode"] == one.of["guest"]]
    if not found:
        raise Unmeasured("The record has no guest.")
    hybrid_alone = all((one.values["hbm_nodes"] > 0) == (one.of["guest"] == "hybrid")
                       for one in found)  # fmt: skip
    return Outcome(
        f"hbmcomm info names the mode in {len(named)} of {len(found)} guests; nodes of HBM exist"
        f" {'in hybrid mode alone' if hybrid_alone else 'in other modes too'}.",
        graded(hybrid_alone and len(named) == len(found), bool(named)),
        "The guests' firmware describes the cache, and hbm's detection of it is real.",
    )


_PLACED_CLAIMS = (
    Claim(
        WOO,
        "Section 4.2",
        "With memkind behind NumPy's arrays, processes of Python exchange their data in MCDRAM.",
        _requested,
        _PLACED_RULE,
    ),
    Claim(
        WOO,
        "Section 4.3, Fig. 7",
        "In SNC-4, each of four containers has its memory on the nodes next to its cores.",
        _own_quarter,
        _PLACED_RULE,
    ),
)

_NO_CACHE = unmeasurable(
    "The firmware only describes a cache, so it makes nothing faster; no machine with MCDRAM is"
    " available."
)
_MODE_CLAIMS = (
    Claim(
        WOO,
        "Section 3.4, memory modes",
        "In cache mode all MCDRAM is a cache; in hybrid mode a part of it is memory.",
        _modes,
        "It holds if hbmcomm info finds this in all guests, and in part if it names some modes.",
    ),
    Claim(
        WOO,
        "Fig. 8, cache mode",
        "With MCDRAM as a cache, a broadcast of buffers is up to 88 % faster than in DDR4.",
        _NO_CACHE,
    ),
    Claim(
        WOO,
        "Fig. 9, cache mode",
        "With MCDRAM as a cache, a gather of buffers is up to 13 % faster than in DDR4.",
        _NO_CACHE,
    ),
    Claim(
        WOO,
        "Fig. 10, cache mode",
        "With MCDRAM as a cache, an allreduce of buffers is up to 110 % faster than in DDR4, and"
        " one of objects up to 76 % faster than in MCDRAM in flat mode.",
        _NO_CACHE,
    ),
    Claim(
        WOO,
        "Section 6, point 1; Figs. 8 to 10, flat and cache mode",
        "MCDRAM in flat mode is the fastest, MCDRAM as a cache is second, and DDR4 alone is the"
        " slowest. Only an allreduce of objects is fastest with MCDRAM as a cache.",
        _NO_CACHE,
    ),
)

_ONE_MEMORY = unmeasurable(
    "No machine with two kinds of memory is available; the section placement counts which memory"
    " holds the data."
)
_NO_QUARTERS = unmeasurable(
    "No chip in SNC-4 is available; the section placement counts the bytes in each quarter."
)
_SPEED_CLAIMS = (
    Claim(
        WOO,
        "Fig. 8, flat mode; abstract",
        "A broadcast of buffers is up to 487 % faster in MCDRAM than in DDR4 (16 processes, one"
        " container).",
        _ONE_MEMORY,
    ),
    Claim(
        WOO,
        "Fig. 9, flat mode",
        "A gather of buffers is up to 74 % faster in MCDRAM than in DDR4.",
        _ONE_MEMORY,
    ),
    Claim(
        WOO,
        "Fig. 10, flat mode",
        "An allreduce of buffers is up to 162 % faster in MCDRAM than in DDR4.",
        _ONE_MEMORY,
    ),
    Claim(
        WOO,
        "Figs. 8 and 10, MCDRAM",
        "In MCDRAM, an allreduce of buffers takes about as long as in C, and so does a broadcast on"
        " the host and in one container.",
        unmeasurable("No machine with MCDRAM is available; the section processes has DDR."),
    ),
    Claim(
        WOO,
        "Table 1; section 6, point 1",
        "On the host, buffers in DDR4 take 545 % (broadcast, 16 processes), 159 % (gather, 64) and"
        " 262 % (allreduce, 68) of MCDRAM's time.",
        _ONE_MEMORY,
    ),
    Claim(
        WOO,
        "Table 2",
        "On the host, C in DDR4 takes 271 % (broadcast, 16 processes), 103 % (gather, 16) and 201 %"
        " (allreduce, 32) of MCDRAM's time, so buffers gain more by MCDRAM than C.",
        _ONE_MEMORY,
    ),
    Claim(
        WOO,
        "Table 3; section 6, point 1",
        "In four containers, buffers in DDR4 take 202 % (broadcast, 68 processes), 131 % (gather,"
        " 64) and 217 % (allreduce, 64) of MCDRAM's time.",
        _ONE_MEMORY,
    ),
    Claim(
        WOO,
        "Table 4",
        "In four containers, C in DDR4 takes 105 % (broadcast, 68 processes), 108 % (gather, 64)"
        " and 102 % (allreduce, 32) of MCDRAM's time, so buffers gain more by MCDRAM than C there,"
        " too.",
        _ONE_MEMORY,
    ),
    Claim(
        WOO,
        "Fig. 11; section 6, point 3",
        "On the host and in four containers, SNC-4 is hardly faster or slower than quadrant mode,"
        " although shorter paths were expected to make it faster. So quadrant mode suits MPI"
        " better: it needs no change of the code.",
        _NO_QUARTERS,
    ),
    Claim(
        WOO,
        "Table 6; section 6, point 3",
        "On the host, with 68 processes and buffers in MCDRAM, SNC-4 takes 5 % more time"
        " (broadcast), 1 % less (gather) and 12 % more (allreduce) than quadrant mode.",
        _NO_QUARTERS,
    ),
    Claim(
        WOO,
        "Table 7; section 6, point 3",
        "In four containers, with 68 processes and buffers in MCDRAM, SNC-4 takes 2 % more time"
        " than quadrant mode (broadcast), or the same time within 1 % (gather, allreduce).",
        _NO_QUARTERS,
    ),
)


def _run(name: str, section: str) -> Run:
    arguments = [f"--sections={section}"]
    return Run(name, "papers.placement", arguments, arguments)


PLACEMENT = Experiment(
    name="placement",
    figures="Fig. 11, Tables 1 to 4, 6 and 7: placement of memory",
    label=Label.EMULATED,
    differs=(
        "4 ranks with tensors of 4 MiB run in a virtual machine that has nodes of HBM. In the mode"
        " SNC-4 the machine has four quarters. The paper has 16 to 68 processes with 256 MB (gather"
        " 16 MB) on a Xeon Phi. The kernel reports the real node of each page (move_pages), but all"
        " nodes are in the host's only memory. So no times were measured. Four processes that are"
        " bound to a node each (HBMCOMM_BIND=numa) emulate four containers. In SNC-4 these nodes"
        " are the quarters. In quadrant mode all processes are bound to the only node with"
        " processors, so there the part on a rank's own node says nothing. Processes on the host"
        " are not bound here; the paper binds them to cores in SNC-4. A share is the part of the"
        " memory that is of the requested kind. The segments and MPI's buffers of a line include"
        " memory of earlier collectives. In the last column, seconds are of Python buffers in"
        " MCDRAM with 68 processes. Percentages are for the number of processes with which MCDRAM"
        " gains most."
    ),
    claims=_PLACED_CLAIMS,
    runs=(_run(_RUN, PLACED),),
    table=_table,
    panels=lambda results: (),
)

MEMORY_MODES = Experiment(
    name=_MODES,
    figures="Figs. 8 to 10, cache mode",
    label=Label.EMULATED,
    differs=(
        "The virtual machines' firmware describes a memory-side cache in front of DDR, and in"
        " hybrid mode also a node of HBM. hbm's detection is real, but the cache is not, so no"
        " times were measured. Cache mode has no node to bind to. There hbm allocates DDR, behind"
        " the cache (docs/memory.md)."
    ),
    claims=_MODE_CLAIMS,
    runs=(_run(_MODES, MODES),),
    table=_modes_table,
    panels=lambda results: (),
)

MEMORY_SPEED = Experiment(
    name="memory-speed",
    figures="Tables 1 to 4, 6 and 7, Figs. 8 to 11: how fast a kind of memory is",
    label=Label.NOT_MEASURABLE,
    differs=(
        "No machine with HBM or with a chip in SNC-4 is available, and all nodes of a virtual"
        " machine are in one memory."
    ),
    claims=_SPEED_CLAIMS,
    runs=(),
    table=lambda results: Table(("figure", "needed hardware", "substitute here"), _SPEEDS),
    panels=lambda results: (),
)
