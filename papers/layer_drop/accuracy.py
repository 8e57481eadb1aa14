"""Measures the loss of quality if training sends only a part of the bytes:

    python -m papers.layer_drop.accuracy --task convolutions --optimizer AdamW --seeds 5

It compares plain training, low_rank_hook with its defaults, and PyTorch's PowerSGD at the largest
rank that sends no more bytes than the hook. For each seed, all contenders start with the same
weights, and get the data in the same order. With `--contenders bfloat16` the hook sends bfloat16:
twice as many numbers in the same bytes. With `--contenders bytes paper blocks` it also trains with
layer_drop_hook and each of these targets. *ternary* sends blocks of -1, 0 and 1, so that more
blocks fit into the same bytes. `--first-seed 5 --seeds 5` takes the seeds 5 to 9.

*server* and *sync-server* train with ParameterServer and SyncParameterServer, whose workers drop
layers; with R = 0 they send all.

One process emulates 4 ranks (learning.py). *ternary* and the servers need real ranks, and so
`--megabits`. The numbers of a single rank would take fewer bytes than the sums of 4 ranks. Each
worker of a server chooses its layers alone.

With `--megabits 100` there are 4 ranks on two hosts: network namespaces joined by a link of that
rate. This needs root. The program then also measures the time until a contender is as good as plain
training at its end. With `--more-steps` contenders train longer than plain training, to find when
they are as good. `python -m papers.plot` draws the records that `--json` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from papers.layer_drop.cluster import two_hosts
from papers.layer_drop.learning import (
    CONTENDERS,
    OPTIMIZERS,
    PLAIN,
    SERVERS,
    TERNARY,
    Learned,
    learn,
)
from papers.layer_drop.tasks import TASKS
from torch_hbmcomm.bench import checkout, report
from torch_hbmcomm.bench.result import Unavailable
from torch_hbmcomm.bench.summary import Summary

_NODES = (0, 0, 1, 1)
# A quality that is lower than plain training's by at most this counts as equal: chance alone makes
# such differences.
_NEAR = {"accuracy": 0.5, "loss": 0.02}

_OF_RANKS = {TERNARY, *SERVERS}
_CHOICES = (*CONTENDERS, *SERVERS)

Train = Callable[..., Learned]


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of quality with a part of the bytes.")
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=None)
    parser.add_argument("--ratios", default="0.9,0.95")
    parser.add_argument("--contenders", nargs="+", choices=_CHOICES, default=CONTENDERS[:2])
    parser.add_argument("--seeds", type=int, default=5, help="the number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--more-steps", type=int, default=0, help="of all contenders except plain")
    parser.add_argument("--rate", type=float, help="learning rate; by default the task's")
    parser.add_argument("--megabits", type=int, help="rate of the link between two emulated hosts")
    parser.add_argument("--json", type=Path, help="append a line for each contender to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exits normally, which removes the hosts
    if args.megabits is None and (alike := _OF_RANKS.intersection(args.contenders)):
        names = ", ".join(sorted(alike))
        parser.error(f"{names}: give --megabits, because one process is not 4 ranks")
    optimizer = args.optimizer or next(iter(TASKS[args.task].rates))
    rate = args.rate or TASKS[args.task].rates[optimizer]
    terms = {"task": args.task, "optimizer": optimizer, "rate": rate, "megabits": args.megabits}
    terms |= {"first_seed": args.first_seed}
    title = f"{args.task}, {optimizer}, {args.steps} steps, {args.seeds} seeds"
    title += f" from {args.first_seed}" if args.first_seed else ""
    title += f", {args.more_steps} steps more than plain" if args.more_steps else ""
    table = Table("", "bytes", "beside plain", "seconds", "by seed", title=title)

    def steps_of(contender: str) -> int:
        return int(args.steps + (0 if contender == PLAIN else args.more_steps))

    try:
        with _one_process(args.task) if args.megabits is None else _hosts(args) as train:

            def measure(contender: str, ratio: float) -> list[Learned]:
                seeds = range(args.first_seed, args.first_seed + args.seeds)
                arguments = {"optimizer": optimizer, "contender": contender, "ratio": ratio}
                arguments |= {"steps": steps_of(contender), "rate": rate}
                return [train(**arguments, seed=seed) for seed in seeds]

            plain = measure(PLAIN, 0)
            cases = [(PLAIN, 0.0, plain)]
            for ratio in map(float, args.ratios.split(",") if args.ratios else ()):
                cases += [(one, ratio, measure(one, ratio)) for one in args.contenders]
    except Unavailable as error:
        parser.error(str(error))
    for contender, ratio, runs in cases:
        row = row_of(plain, runs) | {"contender": contender, "ratio": ratio} | terms
        row["steps"] = steps_of(contender)
        row |= checkout.state()
        if args.megabits is not None:
            row |= times_of(plain, runs)
        _show(table, row, _differences(plain, runs) if contender != PLAIN else _qualities(runs))
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    report.show(table)


@contextmanager
def _one_process(task: str) -> Iterator[Train]:
    """Yield a function that trains in this process, which emulates all ranks."""
    torch.set_num_threads(1)
    chosen = TASKS[task]()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield lambda **terms: list(learn(chosen, **terms))[-1]
        dist.destroy_process_group()


@contextmanager
def _hosts(args: argparse.Namespace) -> Iterator[Train]:
    """Yield a function that trains on two hosts."""
    box = not SERVERS.keys().isdisjoint(args.contenders)
    with two_hosts(
        "papers.layer_drop.learning_rank", _NODES, args.megabits, task=args.task, box=box
    ) as hosts:

        def train(**terms: Any) -> Learned:
            hosts.all("begin", **terms)
            found = hosts.all("look")[0]
            while found["steps"][-1] < terms["steps"]:
                found = hosts.all("look")[0]
            return Learned(**found)

        yield train


def row_of(plain: Sequence[Learned], runs: Sequence[Learned]) -> dict[str, Any]:
    """Return the record of a contender: means over the seeds, and statistics of the seeds."""
    differences = _differences(plain, runs)
    several = len(runs) > 1
    return {
        "share": statistics.fmean(run.share for run in runs),
        "difference": statistics.fmean(differences),
        "error": statistics.stdev(differences) / math.sqrt(len(runs)) if several else None,
        "qualities": _statistics(_qualities(runs)),
        "differences": _statistics(differences),
        "steps_at": runs[0].steps,
        "quality_at": _means([run.quality for run in runs]),
    }


def _qualities(runs: Sequence[Learned]) -> list[float]:
    return [run.quality[-1] for run in runs]


def _differences(plain: Sequence[Learned], runs: Sequence[Learned]) -> list[float]:
    return [a - b for a, b in zip(_qualities(runs), _qualities(plain), strict=True)]


def _statistics(samples: Sequence[float]) -> dict[str, float]:
    return {name: one for name, one in asdict(Summary.of(samples)).items() if one is not None}


def times_of(plain: Sequence[Learned], runs: Sequence[Learned]) -> dict[str, Any]:
    """Return the times of the evaluations, and when the quality came near plain's final quality."""
    aim = nearly(statistics.fmean(base.quality[-1] for base in plain))
    seconds, quality = _means([run.seconds for run in runs]), _means([run.quality for run in runs])
    until = (at for at, found in zip(seconds, quality, strict=True) if found >= aim)
    return {"seconds_at": seconds, "seconds_to_plain": next(until, None)}


def nearly(quality: float) -> float:
    """Return the least quality that counts as equal to this one, or better."""
    return quality - _NEAR["loss" if quality < 0 else "accuracy"]


def _means(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(points) for points in zip(*curves, strict=True)]


def _show(table: Table, row: dict[str, Any], seeds: Sequence[float]) -> None:
    """Add a line to the table. seeds: for each seed, plain's quality, or the difference from it."""
    error = f" ± {row['error']:.3f}" if row["error"] is not None else ""
    name, sign = row["contender"], ""
    if name != PLAIN:
        name, sign = f"{name}, R = {row['ratio']}", "+"
    each = " ".join(f"{value:{sign}.3f}" for value in seeds)
    seconds = ""
    if "seconds_at" in row:
        until = row["seconds_to_plain"]
        seconds = f"{row['seconds_at'][-1]:.0f}, as good as plain "
        seconds += "never" if until is None else f"after {until:.0f}"
    difference = f"{row['difference']:+.3f}{error}"
    table.add_row(name, f"{row['share']:.2%}", difference, seconds, each)


if __name__ == "__main__":
    main()
