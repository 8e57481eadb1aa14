"""Section accuracy: the loss of accuracy by asynchrony, at an equal number of samples."""

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rich.console import RenderableType

from benchmarks.processes import rpc_ranks
from benchmarks.verdict import JudgedSection, Verdict
from papers.async_sgd.plan import Plan
from torch_hbmcomm.bench.peer import Peer
from torch_hbmcomm.bench.report import table_of
from torch_hbmcomm.bench.result import (
    Findings,
    Measurement,
    Unavailable,
    sampled,
)

_NAME = "accuracy"
_ABOUT = "four workers learn handwritten digits"

DDP = "DDP"
DROPPING = "staleness=0, drop at R = 0.8"

_WORKERS = 4
_EPOCHS = 16
_SEEDS = 3
_LOSS = 0.5  # most loss of accuracy against DDP, in percentage points

_OPTIONS: dict[str, dict[str, Any] | None] = {
    DDP: None,
    "SyncParameterServer": {"kind": "SyncParameterServer"},
    "ParameterServer": {},
    "staleness=4": {"staleness": 4},
    "staleness=0": {"staleness": 0},
    DROPPING: {"staleness": 0, "drop": {"ratio": 0.8, "warmup": 10}},
    'rule="easgd"': {"rule": "easgd"},
}
"""Arguments of a parameter server, by contender; None: DistributedDataParallel.

"kind" names the class, unless it is ParameterServer. "drop" has the arguments of LayerDrop."""


def _measure(plan: Plan, findings: Findings) -> None:
    """Train with each contender, once for each seed. A sample is the percentage of test images that
    the trained model recognises."""
    if importlib.util.find_spec("sklearn") is None:
        raise Unavailable("scikit-learn is not installed: pip install scikit-learn")
    epochs = max(_EPOCHS // plan.shrink, 1)
    found: dict[str, list[float]] = {contender: [] for contender in _OPTIONS}
    with (
        ThreadPoolExecutor(_WORKERS) as threads,  # so that no rank waits between epochs
        rpc_ranks("papers.async_sgd.accuracy_rank", _WORKERS) as ranks,
    ):
        for seed in range(_SEEDS):
            findings.progress(f"{_NAME}: seed {seed}")
            for contender, options in _OPTIONS.items():
                learn = partial(_learn, options=options, epochs=epochs, seed=seed)
                first, *_ = threads.map(learn, ranks)
                found[contender].append(first)
    case = f"{epochs} epochs"
    findings.add(
        sampled({"section": _NAME, "case": case}, contender, samples, "percent")
        for contender, samples in found.items()
    )


def _learn(rank: Peer, options: dict[str, Any] | None, epochs: int, seed: int) -> float:
    rank.ask("start", options=options, epochs=epochs, seed=seed)
    for _ in range(epochs):
        rank.ask("epoch")
    return float(rank.ask("finish"))


def _render(found: Sequence[Measurement]) -> Iterator[RenderableType]:
    table = table_of(
        f"{_NAME}: {_ABOUT}, {found[0].of['case']}, {found[0].summary.n} seeds; percent of the "
        "test images recognised",
        ["contender", "lowest", "median", "highest", "mean"],
    )
    for one in found:
        numbers = (one.minimum, one.median, one.summary.maximum, one.mean)
        table.add_row(one.contender, *(f"{number:.2f}" for number in numbers))
    yield table


def _verdicts(found: Sequence[Measurement]) -> Iterator[Verdict]:
    means = {one.contender: one.mean for one in found}
    for contender, mean in means.items():
        if contender != DDP:
            gain = mean - means[DDP]
            yield Verdict(f"{contender}: {gain:+.2f} points (≥ -{_LOSS:g})", gain >= -_LOSS)


ACCURACY = JudgedSection(_NAME, _ABOUT, _measure, render=_render, verdicts=_verdicts)
