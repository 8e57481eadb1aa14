"""Kinds of memory and modes of the chip: Woo et al. 2020, Tables 1 to 4, 6 and 7, Fig. 11."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.report.experiment import Experiment, Label, Table
from torch_hbmcomm.bench.result import Result

_PLACES = "`make vm` checks it by the kernel's word: tests/vm/test_placement.py"
_BUFFERS = "`make vm` checks MPI's buffers: tests/vm/test_mpi_buffers.py"

_ROWS = (
    (
        "Tables 1 and 2: DDR4 / MCDRAM on the host, flat mode",
        "buffer 545, 159 and 262 %, C 271, 103 and 201 %, of broadcast, gather and allreduce",
        "the ratio of two kinds of memory",
        _PLACES,
    ),
    (
        "Tables 3 and 4: the same in four containers",
        "buffer 202, 131 and 217 %, C 105, 108 and 102 %",
        "the ratio of two kinds of memory",
        _PLACES,
    ),
    (
        "Figs. 8 to 10, cache mode",
        "MCDRAM as a cache: up to 110 % faster than DDR4 in allreduce",
        "a memory-side cache",
        "-",
    ),
    (
        "Fig. 11, Table 6: SNC-4 on the host",
        "quadrant 0.525, 0.301 and 2.168 s, SNC-4 0.553, 0.297 and 2.421 s",
        "distances between the quarters of a chip",
        _BUFFERS,
    ),
    (
        "Fig. 11, Table 7: SNC-4, four containers",
        "quadrant 2.398, 1.538 and 5.342 s, SNC-4 2.456, 1.531 and 5.361 s",
        "distances between the quarters of a chip",
        _BUFFERS,
    ),
)


def _table(results: Mapping[str, Result]) -> Table:
    return Table(["figure", "the paper", "what it takes", "what stands for it"], _ROWS)


PLACEMENT = Experiment(
    name="placement",
    paper="Woo, Choi, Lee 2020, MPI for Python in MCDRAM",
    figures="Figs. 8 to 10 (cache mode), Fig. 11, Tables 1 to 4, 6 and 7",
    label=Label.NOT_MEASURABLE,
    differs=(
        "Neither HBM nor a chip in SNC-4 is at hand. A virtual machine has nodes of HBM and four"
        " quarters, but all of them are the host's one memory: where a page lies is real there, how"
        " fast it is is not."
    ),
    found=("MCDRAM is faster than DDR4 throughout; SNC-4 is as fast as quadrant mode or slower.",),
    runs=(),
    table=_table,
    panels=lambda results: (),
)
