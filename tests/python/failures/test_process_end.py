"""A process ends with the program's own exit code, whatever its groups and threads are doing.

Each state of a group is tested with each way to leave, in one of three frames: one node, two nodes,
hbm instead of Gloo. Most tests are in the full tier. `python -m harness.endings` runs all
combinations.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import beyond_gloo
from harness.endings import Endings, pairwise_cover

pytestmark = beyond_gloo

QUICK = {
    ("one", "callback", "interrupt_twice"),
    ("one", "called", "exit"),
    ("one", "wait", "del"),
    ("nodes", "destroying", "exit"),
    ("nodes", "sync", "interrupt_twice"),
    ("nodes", "dropped", "in_cycle"),
    ("nodes", "meeting", "exit"),
    ("instead", "sync", "exit"),
    ("instead", "many", "return"),
}
FULL = [case for case in pairwise_cover() if case not in QUICK]


@pytest.fixture(scope="module")
def endings() -> Iterator[Endings]:
    with Endings() as warm:
        yield warm


@pytest.mark.parametrize(
    ("frame", "state", "way"),
    [
        *sorted(QUICK),
        *(pytest.param(*case, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_exit_code(endings: Endings, frame: str, state: str, way: str) -> None:
    ending = endings.run(frame, state, way)
    assert ending.right(way), ending


# A thread loads the extension after hbm's own handlers of the end have run, then uses a group.
LOAD_AT_THE_END = """
import atexit, platform, sys, threading
from pathlib import Path

PAUSE = {"x86_64": "34", "aarch64": "73"}[platform.machine()]  # the system call of a parked thread
ending, loaded, reduced = threading.Event(), threading.Event(), threading.Event()

def let_the_thread_use_a_group():
    ending.set()
    loaded.wait()
    call = Path(f"/proc/self/task/{thread.native_id}/syscall")
    parked = False
    while not (parked or reduced.wait(0.01)):
        parked = call.read_text().split()[0] == PAUSE
    print("parked" if parked else "reduced", flush=True)

atexit.register(let_the_thread_use_a_group)  # before torch is imported, so it runs after hbm's
import torch
import torch.distributed as dist

def use():
    ending.wait()
    dist.init_process_group("hbm", store=dist.HashStore(), rank=0, world_size=1)
    loaded.set()
    dist.all_reduce(torch.ones(1))
    reduced.set()

thread = threading.Thread(target=use, daemon=True)
thread.start()
assert "torch_hbmcomm._C" not in sys.modules
sys.exit(5)
"""


def test_extension_that_a_thread_loads_at_the_end_parks_the_thread() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOAD_AT_THE_END], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "parked\n", "")
