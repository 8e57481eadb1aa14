"""Measures the quality, the bytes and the time of trainings whose workers meet rarely:

    python -m papers.outer_steps --task convolutions --contenders plain low-rank outer

A contender is one of these names, with terms after commas (`outer,every=100,dtype=int8`):

    plain     DistributedDataParallel over hbm
    low-rank  with low_rank_hook; terms of LowRank, by default ratio=0.9
    outer     hbmcomm.OuterSteps; its arguments by name, by default every=50. With `pace=1` a slow
              worker takes fewer steps between two meetings
    boxes     OuterSteps over a memory box that the first worker serves; terms as for outer
    torchft   torchft's DiLoCo over its ProcessGroupGloo, with outer_lr=0.7 and momentum=0.9; by
              default every=50. `outer,momentum=0.9` computes the same. It needs torchft: run with
              build/libraries/bin/python (`make test-libraries`)

The workers are processes on this host. With `--megabits 100` they are on two hosts, network
namespaces joined by a link of that rate. This needs root. `--slow 5` makes the last worker five
times slower: it sleeps. With `--kill-at 1000` the last worker kills itself in that step. The
survivors form the next group and continue.

The first contender is the base: "to base" is when a contender is as good as the base at its end.
"To target" is when a contender is as good as the worst one at its end. For each seed, all
contenders start with the same weights, and get the data in the same order.

With several numbers of `--steps` the program also shows how soon each contender reaches a quality
with its best number of steps (papers/outer_steps/soonest.py).

`python -m papers.plot` draws the records that `--json` writes.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from papers.layer_drop.accuracy import nearly, row_of, times_of
from papers.layer_drop.cluster import Cluster, one_host, two_hosts
from papers.layer_drop.learning import OPTIMIZERS
from papers.layer_drop.tasks import TASKS
from papers.outer_steps import soonest
from papers.outer_steps.rank import LOOKS, Trained
from papers.outer_steps.ways import EVERY, NAMES
from torch_hbmcomm.bench import checkout, report
from torch_hbmcomm.bench.peer import Peer, PeerFailed
from torch_hbmcomm.bench.result import Unavailable

_ROLE = "papers.outer_steps.rank"

Row = Mapping[str, Any]
Train = Callable[..., Trained]


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality, bytes and time if workers meet rarely.")
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="by default the task's first")
    parser.add_argument("--rate", type=float, help="learning rate; by default the task's")
    parser.add_argument("--contenders", nargs="+", default=["plain", "low-rank", "outer"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="+", default=[2000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--megabits", type=int, help="rate of the link between two emulated hosts")
    parser.add_argument("--slow", type=float, default=1, help="of the last worker: times slower")
    parser.add_argument("--kill-at", type=int, help="step in which the last worker kills itself")
    parser.add_argument("--json", type=Path, help="append a line for each contender to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exits normally, which removes the hosts
    args.optimizer = args.optimizer or next(iter(TASKS[args.task].rates))
    args.rate = args.rate or TASKS[args.task].rates[args.optimizer]
    found: list[Row] = []
    try:
        for steps in args.steps:
            if steps < LOOKS:
                raise ValueError(f"--steps is at least {LOOKS}, the number of evaluations")
            for one in args.contenders:
                _check(one, steps, args.slow)
        with _workers(args) as train:
            for steps in args.steps:
                rows = _rows(args, steps, train)
                report.show(_table(args, steps, rows))
                found += rows
                if args.json is not None:
                    with args.json.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows)
    except (Unavailable, ValueError) as error:
        parser.error(str(error))
    except PeerFailed as error:
        sys.exit(str(error))
    if len(args.steps) > 1:
        report.show(soonest.table(found))


def _parse(contender: str) -> tuple[str, dict[str, Any]]:
    """Return the way and its terms. Raises ValueError or Unavailable."""
    way, *pairs = contender.split(",")
    if way not in NAMES:
        raise ValueError(f"contender {way!r} is none of {', '.join(NAMES)}")
    if way == "torchft" and importlib.util.find_spec("torchft") is None:
        raise Unavailable("torchft is missing: `make test-libraries` makes build/libraries with it")
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"a term of {contender!r} is NAME=VALUE, not {wrong[0]!r}")
    terms = dict(pair.split("=", 1) for pair in pairs)
    return way, {name: _value(text) for name, text in terms.items()}


def _check(contender: str, steps: int, slow: float) -> None:
    """Raise ValueError or Unavailable for a contender that cannot take this number of steps."""
    way, terms = _parse(contender)
    if way == "boxes" and slow != 1 and not terms.get("pace"):
        # The clock stops at an evaluation, where the workers wait for each other.
        raise ValueError("with --slow, boxes needs the term pace=1")
    if terms.get("pace"):
        # All workers are at the same meeting at an evaluation, and the slow one has whole steps.
        every = terms.get("every", EVERY)
        if steps % (LOOKS * every) or every % slow:
            raise ValueError(
                f"with pace=1, --steps is a multiple of {LOOKS * every}, {LOOKS} times every, and "
                f"every={every} is a multiple of --slow"
            )


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text  # the name of a dtype


def _rows(args: argparse.Namespace, steps: int, train: Train) -> list[Row]:
    """Train with all contenders, and return a row for each."""
    runs = [_measure(args, one, steps, train) for one in args.contenders]
    target = nearly(min(statistics.fmean(run.quality[-1] for run in some) for some in runs))
    rows: list[Row] = []
    for contender, some in zip(args.contenders, runs, strict=True):
        times = times_of(runs[0], some)
        row = row_of(runs[0], some) | {
            "contender": contender,
            "ratio": 0.0,
            "task": args.task,
            "optimizer": args.optimizer,
            "rate": args.rate,
            "megabits": args.megabits,
            "steps": steps,
            "workers": args.workers,
            "seeds": args.seeds,
            "slow": args.slow,
            "kill_at": args.kill_at,
            "examples_a_step": args.workers * TASKS[args.task].batch,
            "sent_mb": statistics.fmean(run.sent_mb for run in some),
            "lost_seconds": statistics.fmean(run.lost_seconds for run in some),
            "seconds_at": times["seconds_at"],
            **checkout.state(),
        }
        if args.megabits is not None:
            row["crossed_mb"] = statistics.fmean(run.crossed_mb or 0 for run in some)
        base = statistics.fmean(run.quality[-1] for run in runs[0])
        row["to_base"] = _until(row, nearly(base))
        row["target"], row["to_target"] = target, _until(row, target)
        rows.append(row)
    return rows


def _until(row: Row, aim: float) -> dict[str, float] | None:
    """Return the steps, examples and seconds at the first evaluation that reaches the aim."""
    points = zip(row["steps_at"], row["seconds_at"], row["quality_at"], strict=True)
    for steps, seconds, quality in points:
        if quality >= aim:
            examples = steps * row["examples_a_step"]
            return {"steps": steps, "examples": examples, "seconds": seconds}
    return None


@contextmanager
def _workers(args: argparse.Namespace) -> Iterator[Train]:
    """Yield a function that trains. All trainings share the workers, unless a worker dies."""

    def start() -> AbstractContextManager[Cluster]:
        if args.megabits is None:
            return one_host(_ROLE, args.workers, task=args.task)
        where = [2 * rank // args.workers for rank in range(args.workers)]
        return two_hosts(_ROLE, where, args.megabits, task=args.task)

    def train_alone(**arguments: Any) -> Trained:
        with start() as cluster:
            return _train(cluster, arguments)

    if args.kill_at is not None:
        yield train_alone
    else:
        with start() as cluster:
            yield lambda **arguments: _train(cluster, arguments)


def _measure(args: argparse.Namespace, contender: str, steps: int, train: Train) -> list[Trained]:
    """Train with one contender, for each seed."""
    way, terms = _parse(contender)
    arguments = {"way": way, "terms": terms, "optimizer": args.optimizer, "rate": args.rate}
    arguments |= {"steps": steps, "slow": args.slow, "kill_at": args.kill_at}
    return [train(**arguments, seed=seed) for seed in args.seeds]


def _train(cluster: Cluster, arguments: Mapping[str, Any]) -> Trained:
    cluster.all("begin", **arguments)
    before = cluster.received()
    ranks, doomed = list(cluster.ranks), arguments["kill_at"] is not None
    for _ in range(LOOKS):
        found, doomed = _look(ranks, doomed)
    trained = Trained(**found)
    if before:
        crossed = (now - then for now, then in zip(cluster.received(), before, strict=True))
        trained.crossed_mb = statistics.fmean(crossed) / 1e6
    return trained


def _look(ranks: list[Peer], doomed: bool) -> tuple[dict[str, Any], bool]:
    """Return rank 0's training so far, and if the last rank will die. Removes it if it has died."""
    for rank in ranks:
        rank.tell("look")
    found = [rank.answer() for rank in ranks[: len(ranks) - doomed]]
    if doomed:
        try:
            ranks[-1].answer()
        except PeerFailed:
            ranks.pop()
            doomed = False
    return found[0], doomed


def _table(args: argparse.Namespace, steps: int, rows: Sequence[Row]) -> Table:
    link = "" if args.megabits is None else f", {args.megabits} Mbit/s"
    title = f"{args.task}, {args.optimizer}, {steps} steps, {args.workers} workers{link}"
    title += f", one {args.slow:g} times slower" if args.slow != 1 else ""
    title += f", one killed in step {args.kill_at}" if args.kill_at is not None else ""
    headings = ["", "bytes", "sent", "quality", "next to base", "seconds", "to base", "to target"]
    table = Table(*headings, title=title)
    for row in rows:
        error = "" if row["error"] is None else f" ± {row['error']:.3f}"
        sent = f"{row['sent_mb']:.1f} MB"
        sent += f", link {row['crossed_mb']:.1f}" if "crossed_mb" in row else ""
        lost = f", healed in {row['lost_seconds']:.1f}" if row["lost_seconds"] else ""
        table.add_row(
            row["contender"],
            f"{row['share']:.2%}",
            sent,
            f"{row['qualities']['mean']:.3f}",
            f"{row['difference']:+.3f}{error}",
            f"{row['seconds_at'][-1]:.1f}{lost}",
            _when(row["to_base"]),
            _when(row["to_target"]),
        )
    return table


def _when(reached: Mapping[str, float] | None) -> str:
    if reached is None:
        return "never"
    return f"{reached['examples']:,} examples, {reached['seconds']:.1f} s"


if __name__ == "__main__":
    main()
