"""Runs a plan, section by section."""

from collections.abc import Callable

from torch_hbmcomm.bench.async_sgd.contenders import CONTENDERS
from torch_hbmcomm.bench.async_sgd.plan import Plan
from torch_hbmcomm.bench.async_sgd.result import Result
from torch_hbmcomm.bench.async_sgd.section import Findings
from torch_hbmcomm.bench.async_sgd.sections import SECTIONS
from torch_hbmcomm.bench.machine import describe_machine
from torch_hbmcomm.bench.names import check_names
from torch_hbmcomm.bench.unavailable import Unavailable


def check(plan: Plan) -> None:
    """Raises ValueError for names that nobody has."""
    check_names("section", plan.sections, SECTIONS)
    if plan.contenders is not None:
        check_names("contender", plan.contenders, CONTENDERS)


def run(plan: Plan, progress: Callable[[str], None] = lambda what: None) -> Result:
    """Calls `progress` before each step, from no other thread.

    Raises PeerFailed when a box or a worker of ours fails; who else cannot run is left out.
    """
    findings = Findings(progress)
    for name in plan.sections:
        try:
            SECTIONS[name].measure(plan, findings)
        except Unavailable as error:
            findings.unavailable[name] = str(error)
    took_part = {measurement.contender for measurement in findings.measurements}
    return Result(
        machine=describe_machine(),
        sections={name: SECTIONS[name].about for name in plan.sections},
        contenders={name: CONTENDERS[name].about for name in CONTENDERS if name in took_part},
        unavailable=findings.unavailable,
        notes=findings.notes,
        rounds=plan.rounds,
        measurements=findings.measurements,
        trainings=findings.trainings,
    )
