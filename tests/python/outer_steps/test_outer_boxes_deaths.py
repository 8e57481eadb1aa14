"""OuterSteps over boxes: workers are killed or stopped, and others continue."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import seeds
from harness.box_process import TOKEN, BoxProcess
from harness.members import LIMIT, Member, Members, all_call
from harness.outer_steps import Counting, outer_vector
from harness.ps_models import LEAST_SHARD_BYTES

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server import layout

pytestmark = pytest.mark.usefixtures("nothing_left", "many_shards")

COUNT = 30_000  # elements: hundreds of shards
BY = 6.0  # the change in a meeting, which any number of live workers divides


class _Own:
    """The objects that a worker's process keeps between two calls."""

    model: Counting
    optimizer: Any
    outer: hbmcomm.OuterSteps


# The functions that workers call.


def start(url: str, transport: Any) -> None:
    layout.SHARD_BYTES = LEAST_SHARD_BYTES
    _Own.model = Counting(COUNT, torch.float64)
    _Own.optimizer = torch.optim.SGD(_Own.model.parameters(), lr=1.0)
    _Own.outer = hbmcomm.OuterSteps(
        _Own.model,
        _Own.optimizer,
        every=None,
        outer_lr=1.0,
        momentum=0.0,
        box=smb.connect(url, TOKEN, transport=transport),
    )


def move() -> None:
    _Own.model.move(_Own.optimizer, BY)


def train(meetings: int) -> list[float]:
    """Return the change of the outer weights by each meeting."""
    changes = []
    for _ in range(meetings):
        move()
        _Own.outer.meet()
        changes.append(BY / _Own.outer.stats()["workers"])
    return changes


def train_on(report: Path) -> None:
    """Meet until the process is killed, and report each meeting by a line."""
    with report.open("w", buffering=1) as lines:
        while True:
            train(1)
            print("met", file=lines)


def found() -> tuple[float, float]:
    """Return the least and the greatest of the outer weights."""
    weights = outer_vector(_Own.outer, _Own.model)
    return float(weights.min()), float(weights.max())


def met(report: Path) -> int:
    return report.read_text().count("met\n") if report.exists() else 0


def until_met(report: Path, count: int) -> None:
    deadline = time.monotonic() + LIMIT
    while met(report) < count:
        assert time.monotonic() < deadline, f"{met(report)} meetings in {LIMIT} s"
        time.sleep(0.01)


def started(members: Members, count: int, url: str, transport: str) -> list[Member]:
    made = members.start("a" * count)
    for member in made:
        assert member.call(start, url, transport) is None
    return made


def test_survivors_and_a_newcomer_continue(transport: str) -> None:
    """The killed worker's meetings count. Its last step is lost."""
    with BoxProcess("--lease", "10") as box, Members("again") as members:
        three = started(members, 3, box.url, transport)
        changes = sum(sum(each) for each in all_call(three, train, 3))
        three[2].call(move)
        three[2].kill()
        living = three[:2]
        changes += sum(sum(each) for each in all_call(living, train, 3))
        deadline = time.monotonic() + LIMIT
        while True:
            (change,) = living[0].call(train, 1)
            changes += change
            if change == BY / 2:  # the death has been noticed
                break
            assert time.monotonic() < deadline, "the death was not noticed"
            time.sleep(0.05)
        newcomer = started(members, 1, box.url, transport)
        assert newcomer[0].call(found) == (changes, changes)
        changes += sum(sum(each) for each in all_call([*living, *newcomer], train, 2))
        for member in (*living, *newcomer):
            assert member.call(found) == (changes, changes)


def test_a_worker_dies_within_a_meeting(transport: str, tmp_path: Path) -> None:
    """Each shard of its last delta is in the outer weights whole, or not at all."""
    report = tmp_path / "meetings"
    with BoxProcess("--lease", "600") as box, Members("again") as members:
        watches, dies = started(members, 2, box.url, transport)
        dies.begin(train_on, report)
        until_met(report, seeds.draws("meetings").randrange(2, 6))
        dies.kill()
        dies.process.join()
        sure = met(report) * BY / 2
        possible = (sure, sure + BY / 2)
        assert all(weight in possible for weight in watches.call(found))
        (change,) = watches.call(train, 1)
        assert change == BY / 2
        assert all(weight - change in possible for weight in watches.call(found))


def test_a_stopped_worker_holds_no_other(transport: str, tmp_path: Path) -> None:
    """A worker is stopped at any moment of a meeting, and continues after others have met."""
    report = tmp_path / "meetings"
    with BoxProcess("--lease", "600") as box, Members("again") as members:
        trains, stops = started(members, 2, box.url, transport)
        stops.begin(train_on, report)
        until_met(report, 2)
        os.kill(stops.pid, signal.SIGSTOP)
        assert trains.call(train, 10) == [BY / 2] * 10
        os.kill(stops.pid, signal.SIGCONT)
        until_met(report, met(report) + 3)
