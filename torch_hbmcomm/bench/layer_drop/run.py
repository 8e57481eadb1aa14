"""Runs a plan, section by section."""

from __future__ import annotations

from collections.abc import Callable

from torch_hbmcomm.bench.layer_drop.plan import Plan
from torch_hbmcomm.bench.layer_drop.result import Result
from torch_hbmcomm.bench.layer_drop.section import Findings
from torch_hbmcomm.bench.layer_drop.sections import SECTIONS
from torch_hbmcomm.bench.machine import describe_machine
from torch_hbmcomm.bench.unavailable import Unavailable


def run(plan: Plan, progress: Callable[[str], None] = lambda what: None) -> Result:
    """Calls `progress` before each step, from no other thread. REQUIRES: sections that there are.

    Raises PeerFailed when a rank fails; a section that this machine cannot run is left out.
    """
    findings = Findings(progress)
    for name, section in SECTIONS.items():
        if name in plan.sections:
            try:
                section.measure(plan, findings)
            except Unavailable as error:
                findings.unavailable[name] = str(error)
    return Result(
        machine=describe_machine(),
        sections={name: SECTIONS[name].about for name in SECTIONS if name in plan.sections},
        unavailable=findings.unavailable,
        rows=findings.rows,
    )
