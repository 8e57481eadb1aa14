"""Runs in which a process ends, for each state of its group and each way to leave, in each frame.

The frames are one node, two nodes, and hbm instead of Gloo.

    python -m harness.endings --runs 5 --waiting-runs 50     (in tests/python)

prints a table of the runs that ended right, and the output of all others. --states, --ways and
--frames each take a list of values, separated by commas, and leave out other values.

A run takes half a second of processor time. So the tests run only pairwise_cover(): each state with
each way, in one frame.

The ranks are plain forks of one process that has imported torch. They are no children of
multiprocessing, because these leave by os._exit, which skips the interpreter's shutdown. Rank 0
brings its group into the state and leaves. Rank 1 ends once rank 0 has ended. A run is right if
rank 0 has the exit code of its way (WAYS), rank 1 has the code 0, and /dev/shm is as before. Only a
process that ends within MPI_Init may leave names there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from harness import shm

FRAMES = ("one", "nodes", "instead")
# States of rank 0's group.
STATES = (
    "idle",
    "destroyed",
    "aborted",
    "broken",
    "in_flight",
    "dropped",
    "many",
    "then",
    # In the following states a thread waits:
    "wait",
    "sync",
    "receive",
    "callback",
    "called",
    "subgroup",
    "destroying",
    "forming",
    "meeting",
    "forming_subgroup",
)
WAITING = STATES[STATES.index("wait") :]
# The exit code of each way; negative: the signal.
WAYS = {
    "return": 0,
    "exit": 5,
    "exit_in_thread": 0,
    "raise": 1,
    "interrupt": -SIGINT,
    "interrupt_twice": -SIGINT,
    "terminate": -SIGTERM,
    "os_exit": 5,
    # In the following ways Python alone owns the group, not torch.distributed, and main returns:
    "del": 0,
    "in_global": 0,
    "in_cycle": 0,
    "in_thread_local": 0,
}
LIMIT = 120.0  # seconds; a run takes one


def pairwise_cover() -> list[tuple[str, str, str]]:
    """Return few triples (frame, state, way) that have every pair of values of any two of these."""
    return [
        (FRAMES[(i + j) % len(FRAMES)], state, way)
        for i, state in enumerate(STATES)
        for j, way in enumerate(WAYS)
    ]


@dataclass(frozen=True)
class Ending:
    """The result of one run."""

    codes: list[int | None]  # by rank; None: it hung
    output: str
    left: list[str]  # in /dev/shm

    def right(self, way: str) -> bool:
        return self.codes == [WAYS[way], 0] and not self.left


class Endings:
    """A process that has imported torch, and forks the ranks of each run. A context manager."""

    def __enter__(self) -> Endings:
        self._folder = tempfile.TemporaryDirectory(prefix="hbmcomm-ends-")
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "harness.ending_ranks", self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._warm.stdin is not None
        self._warm.stdin.close()
        self._warm.wait(LIMIT)
        self._folder.cleanup()

    def run(self, frame: str, state: str, way: str) -> Ending:
        assert self._warm.stdin is not None and self._warm.stdout is not None
        before = shm.entries()
        print(json.dumps([frame, state, way, LIMIT]), file=self._warm.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._warm.stdout.readline())
        left = shm.left_since(before)
        if state == "meeting" and way in ("terminate", "os_exit"):
            for name in left:  # a process that ends within MPI_Init cannot remove names
                (shm.SHM / name).unlink(missing_ok=True)
            left = set()
        return Ending(answer["codes"], answer["output"], sorted(left))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the table of ends.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--waiting-runs", type=int, default=50, help="where a thread waits")
    for name, all_of_them in (("frames", FRAMES), ("states", STATES), ("ways", tuple(WAYS))):
        parser.add_argument(f"--{name}", default=",".join(all_of_them))
    chosen = parser.parse_args()
    ways = chosen.ways.split(",")
    wrong: Counter[str] = Counter()
    shm.isolate()
    with Endings() as endings:
        for frame in chosen.frames.split(","):
            print(f"\n| {frame} | " + " | ".join(ways) + " |\n|" + " --- |" * (len(ways) + 1))
            for state in chosen.states.split(","):
                runs = chosen.waiting_runs if state in WAITING else chosen.runs
                row = []
                for way in ways:
                    ends = [endings.run(frame, state, way) for _ in range(runs)]
                    bad = [end for end in ends if not end.right(way)]
                    row.append(f"{runs - len(bad)}/{runs}")
                    for end in bad:
                        wrong[f"{frame} {state} {way}: {end.codes} {end.left} {end.output}"] += 1
                print(f"| {state} | " + " | ".join(row) + " |", flush=True)
    for what, count in wrong.items():
        print(f"\n{count} x {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        raise SystemExit(main())
    os._exit(1)
