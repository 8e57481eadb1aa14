"""Measures the time that a hook with ratio="auto" costs or saves, on links of several rates:

    python -m papers.layer_drop.automatic --json papers/records/automatic.json

On each link, plain DDP, low_rank_hook and layer_drop_hook train the same perceptron in turn, each
from its first step on. So the steps in which a hook measures are included. A pair is a run of a
hook and the plain run of the same turn. Every second turn has the reverse order, so that a drift of
the machine adds to both sides. "spread" is the range of plain runs, each divided by the plain run
before. Two ranks are on two hosts, which are network namespaces joined by a link of that rate. This
needs root. "shared memory" are two ranks on one host.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from papers.layer_drop.cluster import Cluster, one_host, two_hosts
from papers.layer_drop.plan import link
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    Unavailable,
    check_names,
    describe_machine,
    sampled,
)

HOOKS = {
    "low_rank": 'low_rank_hook with ratio="auto"',
    "layer_drop": 'layer_drop_hook with ratio="auto"',
}
PLAIN = "plain"

_ROLE = "papers.layer_drop.automatic_rank"
_SHARED = "shared memory"
_NAMES = {-1.0: "none yet", 0.0: "off", 0.5: "bfloat16", 0.9: "R = 0.9"}


def main() -> None:
    parser = argparse.ArgumentParser(description='Plain DDP compared with ratio="auto".')
    parser.add_argument("--megabits", default=f"100,1000,10000,{_SHARED}", help="rates of links")
    parser.add_argument("--hooks", default=",".join(HOOKS), help="separated by commas")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each kind on each link")
    parser.add_argument("--steps", type=int, default=200, help="of a run")
    parser.add_argument("--width", type=int, default=256, help="of the perceptron's layers")
    parser.add_argument("--batch", type=int, default=128, help="samples of a rank in a step")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    hooks = report.names(args.hooks)
    try:
        check_names("hook", hooks, HOOKS)
    except ValueError as error:
        parser.error(str(error))
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"{args.json}: there is no such directory")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exits normally, which removes the hosts
    found: list[Measurement] = []
    try:
        for megabits in report.names(args.megabits):
            with _hosts(megabits, args.width, args.batch) as hosts:
                found += _measure(hosts, _name(megabits), hooks, args.pairs, args.steps)
    except Unavailable as error:
        parser.error(str(error))
    result = Result(
        benchmark="automatic",
        machine=describe_machine(),
        plan={
            "ranks": 2,
            "pairs": args.pairs,
            "steps": args.steps,
            "width": args.width,
            "batch": args.batch,
        },
        contenders={PLAIN: "DDP without a hook"} | {hook: HOOKS[hook] for hook in hooks},
        measurements=found,
    )
    report.finish(_table(result), result, args.json)


def _name(megabits: str) -> str:
    return megabits if megabits == _SHARED else link(int(megabits))


def _hosts(megabits: str, width: int, batch: int) -> AbstractContextManager[Cluster]:
    if megabits == _SHARED:
        return one_host(_ROLE, 2, width=width, batch=batch)
    return two_hosts(_ROLE, (0, 1), int(megabits), width=width, batch=batch)


def _measure(
    hosts: Cluster, name: str, hooks: Sequence[str], pairs: int, steps: int
) -> Iterator[Measurement]:
    """Measure plain DDP and the hooks on one link. A sample is a run, in seconds.

    The curves have the runs in the order of the turns: "seconds", and for a hook the "chosen_ratio"
    of each.
    """
    order = [PLAIN, *hooks]
    seconds: dict[str, list[float]] = {who: [] for who in order}
    chosen: dict[str, list[float]] = {who: [] for who in order}
    hosts.all("train", hook=None, steps=5)  # connects the ranks
    for turn in range(pairs):
        report.say(f"{name}: turn {turn + 1} of {pairs}")
        for who in order if turn % 2 == 0 else reversed(order):
            hook = None if who == PLAIN else who
            took, ratio = hosts.all("train", hook=hook, steps=steps)[0]
            seconds[who].append(took)
            chosen[who].append(ratio)
    for who in order:
        values: dict[str, float] = {}
        curves = {"seconds": seconds[who]}
        if who != PLAIN:
            both = zip(seconds[who], seconds[PLAIN], strict=True)
            values["paired_share"] = statistics.median(ours / plain for ours, plain in both)
            curves["chosen_ratio"] = chosen[who]
        elif len(seconds[who]) > 1:
            spread = [after / before for before, after in pairwise(seconds[who])]
            values |= {"least_spread": min(spread), "largest_spread": max(spread)}
        yield sampled({"link": name}, who, seconds[who], "s", values=values, curves=curves)


def _table(result: Result) -> Table:
    """Return a table with a row for each link and hook."""
    pairs, steps = result.plan["pairs"], result.plan["steps"]
    title = f"{pairs} pairs of {steps} steps, seconds of a run (median)"
    table = Table("link", "hook", "plain", "auto", "auto / plain", "spread", "chosen", title=title)
    for row in report.rows(result.measurements):
        plain = row[PLAIN]
        spread = [
            f"{plain.values[name]:.3f}"
            for name in ("least_spread", "largest_spread")
            if name in plain.values
        ]
        for who, one in row.items():
            if who == PLAIN:
                continue
            chosen = Counter(_NAMES[ratio] for ratio in one.curves["chosen_ratio"])
            table.add_row(
                one.of["link"],
                who,
                f"{plain.median:.3f}",
                f"{one.median:.3f}",
                f"{one.values['paired_share']:.3f}",
                " to ".join(spread) or "-",
                ", ".join(f"{name} ({count})" for name, count in chosen.most_common()),
            )
    return table


if __name__ == "__main__":
    main()
