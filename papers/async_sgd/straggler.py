"""Section straggler: the delay that one slow worker causes for the other workers."""

import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType

from benchmarks.processes import rpc_ranks
from benchmarks.verdict import JudgedSection, Verdict
from papers.async_sgd.plan import Plan
from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import Peer
from torch_hbmcomm.bench.report import table_of
from torch_hbmcomm.bench.result import (
    Findings,
    Measurement,
    sampled,
)

_NAME = "straggler"
_ABOUT = "three workers alone, and with a fourth, 5 times slower (4 MiB, 20 ms of sleep a step)"

SHM = "ParameterServer shm"
TCP = "ParameterServer tcp"
DDP = "DDP"

ALONE, HELD_UP = "alone", "beside a slow one"

_FAST = 3
_TIMES = 5
_COMPUTE = 0.02  # seconds
_STEPS = 50
_ROUNDS = 7
_LEAST = 0.95  # least share of the speed that the fast workers have without the slow one

_Turn = Callable[[Sequence[Peer]], list[float]]
"""Trains the given workers. Returns, for each worker, the seconds of a step."""


def _measure(plan: Plan, findings: Findings) -> None:
    """Alternate the contenders. A sample is a fast worker's steps per second in one turn."""
    steps = max(_STEPS // plan.shrink, _TIMES)
    token = secrets.token_hex(16)
    with (
        smb.Server(memory="256MiB", token=token, accumulate_threads=plan.threads) as server,
        rpc_ranks("papers.async_sgd.straggler_rank", _FAST + 1) as ranks,
    ):

        def over_box(transport: str) -> _Turn:
            def turn(workers: Sequence[Peer]) -> list[float]:
                name = secrets.token_hex(8)  # names a new job
                for number, worker in enumerate(workers):
                    slow = number == _FAST
                    worker.tell(
                        "parameter_server",
                        url=server.url,
                        token=token,
                        transport=transport,
                        name=name,
                        workers=len(workers),
                        compute=_compute(number),
                        steps=steps // _TIMES if slow else steps,
                    )
                return [worker.answer() for worker in workers]

            return turn

        def ddp(workers: Sequence[Peer]) -> list[float]:
            for number, worker in enumerate(workers):
                worker.tell("ddp", workers=len(workers), compute=_compute(number), steps=steps)
            return [worker.answer() for worker in workers]

        turns: dict[str, _Turn] = {SHM: over_box("shm"), TCP: over_box("tcp"), DDP: ddp}
        speeds: dict[tuple[str, str], list[float]] = {}
        for round_ in range(1 if plan.shrink > 1 else _ROUNDS):
            findings.progress(f"{_NAME}: round {round_ + 1}")
            for contender, turn in turns.items():
                for case, workers in ((ALONE, ranks[:_FAST]), (HELD_UP, ranks)):
                    seconds = statistics.fmean(turn(workers)[:_FAST])
                    speeds.setdefault((contender, case), []).append(1 / seconds)
    for contender in turns:
        findings.add(of_turns(contender, speeds[contender, ALONE], speeds[contender, HELD_UP]))


def of_turns(
    contender: str, alone: Sequence[float], held_up: Sequence[float]
) -> Iterator[Measurement]:
    """Make the measurements of a contender from its speeds in each turn.

    "share" is a median over the rounds. In each round, the speed with the slow worker (held_up) is
    divided by the speed without it (alone). Both speeds are of the same round, because the
    machine's speed differs from round to round.
    """
    share = statistics.median(b / a for a, b in zip(alone, held_up, strict=True))
    for case, speeds, values in ((ALONE, alone, {}), (HELD_UP, held_up, {"share": share})):
        of = {"section": _NAME, "case": case}
        yield sampled(of, contender, speeds, "steps_per_s", values=values)


def _render(found: Sequence[Measurement]) -> Iterator[RenderableType]:
    table = table_of(
        f"{_NAME}: {_ABOUT}; steps of a fast worker in a second",
        ["contender", ALONE, HELD_UP, "of the speed alone"],
    )
    for contender, alone, held_up in _pairs(found):
        speeds = [f"{one.median:.1f}" for one in (alone, held_up)]
        table.add_row(contender, *speeds, f"{held_up.values['share']:.1%}")
    yield table


def _verdicts(found: Sequence[Measurement]) -> Iterator[Verdict]:
    for contender, _, held_up in _pairs(found):
        if contender != DDP:
            share = held_up.values["share"]
            text = f"{contender}: {share:.1%} of the speed alone (≥ {_LEAST:.0%})"
            yield Verdict(text, share >= _LEAST)


def _pairs(found: Sequence[Measurement]) -> Iterator[tuple[str, Measurement, Measurement]]:
    cells = {(one.contender, one.of["case"]): one for one in found}
    for contender in dict.fromkeys(one.contender for one in found):
        yield contender, cells[contender, ALONE], cells[contender, HELD_UP]


def _compute(number: int) -> float:
    return _COMPUTE * (_TIMES if number == _FAST else 1)


STRAGGLER = JudgedSection(_NAME, _ABOUT, _measure, render=_render, verdicts=_verdicts)
