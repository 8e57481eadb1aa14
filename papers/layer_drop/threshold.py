"""Section threshold: the time to find a threshold, and to compare with the threshold.

A contender uses one value of each layer, as the paper does, or every gradient. The comparison of
layers includes the computation of their values. The selection collects the values and the places of
single gradients, which a message needs. A message of whole layers needs no places.
"""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.verdict import JudgedSection
from papers.layer_drop.contenders import RATIO
from papers.layer_drop.memory_pass import loop_of
from papers.layer_drop.plan import Plan
from papers.layer_drop.rows import row
from papers.layer_drop.table import tables
from papers.layer_drop.threshold_rank import COMPARISONS, SEARCHES
from torch_hbmcomm import machine
from torch_hbmcomm.bench.peer import peer
from torch_hbmcomm.bench.result import Findings
from torch_hbmcomm.bench.rounds import interleave

NAME = "threshold"
SEARCH, COMPARISON = "search", "comparison"
_ABOUT = (
    "the time to find a threshold, and to compare with it, for gradients of ResNet-50's sizes; "
    f"R = {RATIO:g}"
)


def _measure(plan: Plan, findings: Findings) -> None:
    cores = machine.cores()
    with peer("papers.layer_drop.threshold_rank") as process:
        for threads in sorted({1, cores}):
            process.ask("prepare", width=plan.width, threads=threads, ratio=RATIO)
            for what, contenders in ((SEARCH, SEARCHES), (COMPARISON, COMPARISONS)):
                case = f"{what}, {threads} thread{'s' if threads > 1 else ''}"
                findings.progress(f"{NAME}: {case}")
                loops = {who: loop_of(process, who) for who in contenders}
                for who, samples in interleave(loops, plan.passes, alone=()).items():
                    times = [one / 1e3 for one in samples.interleaved]
                    values = {"time_ms": statistics.median(times)}
                    findings.add([row(NAME, case, who, values, times)])


THRESHOLD = JudgedSection(NAME, _ABOUT, _measure, render=partial(tables, _ABOUT))
