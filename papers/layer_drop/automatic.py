"""Measures the time that low_rank_hook with ratio="auto" costs or saves, on links of several rates:

    python -m papers.layer_drop.automatic

On each link, plain DDP and the hook train the same perceptron alternately, from its first step on.
So the steps in which the hook measures are included. "spread" is the range of plain runs, each
divided by the plain run before. Two ranks are on two hosts, which are network namespaces joined by
a link of that rate. This needs root. "shared memory" are two ranks on one host.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

from rich.table import Table

from papers.layer_drop.cluster import Cluster, one_host, two_hosts
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.result import Unavailable

_ROLE = "papers.layer_drop.automatic_rank"
_SHARED = "shared memory"
_NAMES = {-1.0: "none yet", 0.0: "off", 0.5: "bfloat16", 0.9: "R = 0.9"}


def main() -> None:
    parser = argparse.ArgumentParser(description='Plain DDP compared with ratio="auto".')
    parser.add_argument("--megabits", default=f"100,1000,10000,{_SHARED}", help="rates of links")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each kind on each link")
    parser.add_argument("--steps", type=int, default=200, help="of a run")
    parser.add_argument("--width", type=int, default=256, help="of the perceptron's layers")
    parser.add_argument("--batch", type=int, default=128, help="samples of a rank in a step")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exits normally, which removes the hosts
    title = f"{args.pairs} pairs of {args.steps} steps, seconds of a run (median)"
    table = Table("link", "plain", "auto", "auto / plain", "spread", "chosen", title=title)
    try:
        for megabits in args.megabits.split(","):
            with _hosts(megabits, args.width, args.batch) as hosts:
                table.add_row(*_row(hosts, megabits, args.pairs, args.steps))
    except Unavailable as error:
        parser.error(str(error))
    report.show(table)


def _hosts(megabits: str, width: int, batch: int) -> AbstractContextManager[Cluster]:
    if megabits == _SHARED:
        return one_host(_ROLE, 2, width=width, batch=batch)
    return two_hosts(_ROLE, (0, 1), int(megabits), width=width, batch=batch)


def _row(hosts: Cluster, megabits: str, pairs: int, steps: int) -> list[str]:
    plain: list[float] = []
    automatic: list[float] = []
    chosen: Counter[str] = Counter()
    hosts.all("train", automatic=False, steps=5)  # connects the ranks
    for _ in range(pairs):
        plain.append(hosts.all("train", automatic=False, steps=steps)[0][0])
        seconds, ratio = hosts.all("train", automatic=True, steps=steps)[0]
        automatic.append(seconds)
        chosen[_NAMES[ratio]] += 1
    return [
        megabits if megabits == _SHARED else f"{megabits} Mbit/s",
        f"{statistics.median(plain):.3f}",
        f"{statistics.median(automatic):.3f}",
        f"{statistics.median(automatic) / statistics.median(plain):.3f}",
        _spread(plain),
        ", ".join(f"{name} ({count})" for name, count in chosen.most_common()),
    ]


def _spread(plain: Sequence[float]) -> str:
    """Return the range of a plain run divided by the one before."""
    ratios = [after / before for before, after in pairwise(plain)]
    return f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"


if __name__ == "__main__":
    main()
