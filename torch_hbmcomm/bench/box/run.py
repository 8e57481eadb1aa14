"""Runs a plan, section by section."""

from collections.abc import Callable

from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import Result
from torch_hbmcomm.bench.box.section import Findings
from torch_hbmcomm.bench.box.sections import SECTIONS
from torch_hbmcomm.bench.machine import describe_machine
from torch_hbmcomm.bench.unavailable import Unavailable


def run(plan: Plan, progress: Callable[[str], None] = lambda section: None) -> Result:
    """Calls `progress` before each section, from no other thread.

    Raises PeerFailed when a box or a client of ours fails; who else cannot run is left out.
    """
    findings = Findings()
    for name in plan.sections:
        progress(name)
        try:
            SECTIONS[name].measure(plan, findings)
        except Unavailable as error:
            findings.unavailable[name] = str(error)
    return Result(
        machine=describe_machine(),
        sections={name: SECTIONS[name].about for name in plan.sections},
        unavailable=findings.unavailable,
        notes=findings.notes,
        rounds=plan.rounds,
        measurements=findings.measurements,
    )
