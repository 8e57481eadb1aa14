"""What dropping costs a worker, on one host and without anybody else."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from torch_hbmcomm.bench import machine
from torch_hbmcomm.bench.box.interleave import interleave
from torch_hbmcomm.bench.layer_drop.cluster import one_host
from torch_hbmcomm.bench.layer_drop.contenders import PLAIN, RATIO, Contender, dropping
from torch_hbmcomm.bench.layer_drop.plan import Plan
from torch_hbmcomm.bench.layer_drop.section import Findings, Row, Section, cases
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.bench.report import Verdict

NAME = "pass"
_ABOUT = "what dropping costs a worker with ResNet-50's layers"
_ITERATION = "beside an iteration of it, batch 8"
_ACCUMULATE, _ADD, _TRIAD = "accumulate", "torch.add", "triad"
_STEP, _HOOK = "forward and backward", f"the hook, R = {RATIO:g}"

_WARM = 2
_STEPS = 20  # of the hook in a round

_OF_BANDWIDTH = 0.7
_OF_ITERATION = 0.015


def _measure(plan: Plan, findings: Findings) -> None:
    cores = machine.cores()
    with peer("layer_drop.pass_rank") as passes:
        findings.progress(f"{NAME}: {_STEP}")
        iterations = passes.ask(
            "iterations", width=plan.width, side=plan.side, threads=cores, count=plan.passes
        )
        for threads in sorted({1, cores}):
            findings.progress(f"{NAME}: {threads} threads")
            findings.rows += _pass(passes, plan, threads)
    findings.progress(f"{NAME}: {_HOOK}")
    iteration = statistics.median(iterations) * 1e3
    extra = _extra(plan, cores)
    for who, values in (
        (_STEP, {"iteration_ms": iteration}),
        (_HOOK, {"extra_ms": extra, "extra_share": extra / iteration}),
    ):
        findings.rows.append(Row(NAME, f"{_ITERATION}, {cores} threads", who, values))


def _pass(passes: Peer, plan: Plan, threads: int) -> Iterator[Row]:
    size = passes.ask("prepare", width=plan.width, threads=threads)
    samples = interleave(
        {who: partial(_run, passes, who) for who in (_ACCUMULATE, _ADD, _TRIAD)}, plan.passes
    )
    for who, microseconds in samples.items():
        median = statistics.median(microseconds)
        values = {"pass_ms": median / 1e3, "gb_s": size / median / 1e3}
        case = f"{threads} thread{'s' if threads > 1 else ''}"
        yield Row(NAME, case, who, values, {"pass_ms": [one / 1e3 for one in microseconds]})


def _run(passes: Peer, who: str, calls: int) -> float:
    return float(passes.ask("run", what=who, calls=calls))


def _extra(plan: Plan, cores: int) -> float:
    """Milliseconds that a step of DDP in a group of one takes longer with the hook."""
    seconds: dict[Contender, list[float]] = {PLAIN: [], dropping(RATIO): []}
    with one_host("layer_drop.ddp_rank", 1, width=plan.width, threads=cores) as host:
        for _ in range(plan.passes):
            for contender, times in seconds.items():
                host.all("prepare", **contender.told)
                host.all("train", steps=_WARM)
                times += host.all("train", steps=_STEPS)[0]
                host.all("release")
    plain, hook = (statistics.median(times) for times in seconds.values())
    return (hook - plain) * 1e3


def _verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    for case, found in cases(rows).items():
        if _TRIAD in found:
            ratio = found[_ACCUMULATE].values["gb_s"] / found[_TRIAD].values["gb_s"]
            text = f"{case}: {ratio:.0%} of the triad's bandwidth (≥ {_OF_BANDWIDTH:.0%})"
            yield Verdict(text, ratio >= _OF_BANDWIDTH)
        else:
            share = found[_HOOK].values["extra_share"]
            text = f"{_HOOK}: {share:+.1%} (≤ {_OF_ITERATION:+.1%}; paper: +3.6 to +5.2%)"
            yield Verdict(text, share <= _OF_ITERATION)


PASS = Section(NAME, _ABOUT, _measure, _verdicts)
