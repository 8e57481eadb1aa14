"""Section pass: the cost of dropping for a single worker, on one host."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.programs import Program, program
from benchmarks.verdict import JudgedSection, Verdict
from papers.layer_drop.cluster import one_host
from papers.layer_drop.contenders import LOW_RANK, PLAIN, RATIO, Contender, dropping
from papers.layer_drop.plan import Plan
from papers.layer_drop.rows import cases, row
from papers.layer_drop.table import tables
from torch_hbmcomm import machine
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.bench.result import Findings, Measurement
from torch_hbmcomm.bench.rounds import Timed, interleave

NAME = "pass"
_ABOUT = "the cost of dropping for a worker with ResNet-50's layers"
_ITERATION = "compared with an iteration of ResNet-50, batch 8"
_ACCUMULATE, _ADD, _TRIAD = "accumulate", "torch.add", "triad"
_STEP = "forward and backward"
_PRODUCTS = f"the matrix products of {LOW_RANK.name}"
_LEAST = f"{LOW_RANK.name}, at the least"

_STREAMS = 3  # of a pass: two read, one written
_LINE = 64  # bytes; the triad takes whole ones
_WARM = 2
_STEPS = 20  # steps of the hook in a round

_STREAMS_OF_LOW_RANK = 8
"""Reads and writes of all elements in a step of low rank that fuses no passes.

It reads gradients and residuals, and writes residuals. It reads residuals for both factors. It
reads and writes residuals to subtract the approximation, and writes the bucket."""

_OF_BANDWIDTH = 0.7
_HOOKS = {dropping(RATIO): 0.015, LOW_RANK: 0.03}
"""The hooks, and the largest share of an iteration that each may take."""


def _measure(plan: Plan, findings: Findings) -> None:
    cores = machine.cores()
    with peer("papers.layer_drop.pass_rank") as passes, program("bounds") as bounds:
        findings.progress(f"{NAME}: {_STEP}")
        iterations = passes.ask(
            "iterations", width=plan.width, side=plan.side, threads=cores, count=plan.passes
        )
        for threads in sorted({1, cores}):
            findings.progress(f"{NAME}: {threads} threads")
            found = [*_pass(passes, bounds, plan, threads)]
            findings.add(found)
        findings.progress(f"{NAME}: the hooks")
        extras, ranks = _extra(plan, cores)
        products = passes.ask(
            "products", width=plan.width, threads=cores, ranks=ranks, count=plan.passes
        )
        pace = statistics.median(passes.ask("pace", threads=cores, count=plan.passes))
    iteration = statistics.median(iterations) * 1e3
    case = f"{_ITERATION}, {cores} threads"
    findings.add([row(NAME, case, _STEP, {"iteration_ms": iteration})])
    extras[_PRODUCTS] = statistics.median(products["seconds"]) * 1e3
    stream = min(one.values["pass_ms"] for one in found) / _STREAMS
    extras[_LEAST] = products["operations"] / pace * 1e3 + _STREAMS_OF_LOW_RANK * stream
    for name, extra in extras.items():
        values = {"extra_ms": extra, "extra_share": extra / iteration}
        if name == _LEAST:
            values |= {"gflop": products["operations"] / 1e9, "gflop_s": pace / 1e9}
        findings.add([row(NAME, case, name, values)])


def _pass(passes: Peer, bounds: Program, plan: Plan, threads: int) -> Iterator[Measurement]:
    size = passes.ask("prepare", width=plan.width, threads=threads)
    bounds.ask("triad", size // _STREAMS // _LINE * _LINE, threads)
    contenders = {who: loop_of(passes, who) for who in (_ACCUMULATE, _ADD)}
    contenders[_TRIAD] = bounds.timed("run")
    for who, samples in interleave(contenders, plan.passes).items():
        median = statistics.median(samples.interleaved)
        values = {"pass_ms": median / 1e3, "gb_s": size / median / 1e3}
        case = f"{threads} thread{'s' if threads > 1 else ''}"
        yield row(NAME, case, who, values, [one / 1e3 for one in samples.interleaved])


def loop_of(process: Peer, who: str) -> Timed:
    """Return the loop that the process runs for a contender."""

    def run(samples: int, calls: int) -> list[float]:
        found: list[float] = process.ask("run", what=who, samples=samples, calls=calls)
        return found

    return run


def _extra(plan: Plan, cores: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return the milliseconds that each hook adds to a step of DDP in a group of one rank.

    Also returns, for the low-rank hook, the final rank of each matrix's approximation.
    """
    seconds: dict[Contender, list[float]] = {who: [] for who in (PLAIN, *_HOOKS)}
    with one_host("papers.layer_drop.ddp_rank", 1, width=plan.width, threads=cores) as host:
        for _ in range(plan.passes):
            for contender, times in seconds.items():
                host.all("prepare", **contender.arguments)
                host.all("train", steps=_WARM)
                times += host.all("train", steps=_STEPS)[0]
                if contender is LOW_RANK:
                    (ranks,) = host.all("ranks")
                host.all("release")
    plain = statistics.median(seconds[PLAIN])
    extras = {_name(who): (statistics.median(seconds[who]) - plain) * 1e3 for who in _HOOKS}
    return extras, ranks


def _name(hook: Contender) -> str:
    return f"the hook, {hook.name}"


def _verdicts(rows: Sequence[Measurement]) -> Iterator[Verdict]:
    for case, found in cases(rows).items():
        if _TRIAD in found:
            ratio = found[_ACCUMULATE].values["gb_s"] / found[_TRIAD].values["gb_s"]
            text = f"{case}: {ratio:.0%} of the triad's bandwidth (≥ {_OF_BANDWIDTH:.0%})"
            yield Verdict(text, ratio >= _OF_BANDWIDTH)
            continue
        for hook, most in _HOOKS.items():
            share = found[_name(hook)].values["extra_share"]
            bounds = f"≤ {most:+.1%}; paper: +3.6 to +5.2%"
            if hook is LOW_RANK:
                products = found[_PRODUCTS].values["extra_share"]
                bounds += f"; the products alone: {products:+.1%}, "
                bounds += f"at the least {found[_LEAST].values['extra_share']:+.1%}"
            yield Verdict(f"{_name(hook)}: {share:+.1%} ({bounds})", share <= most)


PASS = JudgedSection(NAME, _ABOUT, _measure, render=partial(tables, _ABOUT), verdicts=_verdicts)
