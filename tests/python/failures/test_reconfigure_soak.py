"""Deaths in a long training: the survivors and a newcomer form the next group each time."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo, seeds
from harness.members import WAYS, Member, Members, all_call, handle, reconfigure

from benchmarks.namespaces import NoNamespaces, two_nodes

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

NODES = "aabb"
SIZE = len(NODES)
FORMING = 20.0  # seconds, for a group to form, and for its operations
LONGEST_TRAINING = 0.05  # seconds before a death


class Trained:
    steps = 0
    weight = torch.zeros(1000, dtype=torch.float64)


def synchronise() -> int:
    """Take the weight of the member with most steps. Returns its number of steps."""
    mine = torch.tensor([Trained.steps])
    steps = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, mine)
    furthest = int(torch.stack(steps).argmax())
    dist.broadcast(mine, furthest)
    dist.broadcast(Trained.weight, furthest)
    Trained.steps = int(mine)
    assert (Trained.weight == Trained.steps).all(), "the weight is not the number of steps"
    return Trained.steps


def train() -> tuple[int, str]:
    """Train until a member fails. Returns the number of steps so far, and the error."""
    size = dist.get_world_size()
    expected = size * (size - 1) / 2
    try:
        while True:
            gradient = torch.full((1000,), float(dist.get_rank()), dtype=torch.float64)
            dist.all_reduce(gradient)
            assert (gradient == expected).all(), f"the sum is {gradient[0]}, not {expected}"
            Trained.weight += gradient / expected
            Trained.steps += 1
    except dist.DistError as error:
        return Trained.steps, str(error)


def resources() -> tuple[int, int, int]:
    """Return the numbers of descriptors and threads, and the resident memory in MiB."""
    handle()  # ends the stores of earlier groups
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    )


def victims_of(kind: str, choice: random.Random) -> list[int]:
    if kind == "host":
        return [0]
    count = 2 if kind == "two" else 1
    return choice.sample(range(1, SIZE), count)


@contextmanager
def networks_of_nodes() -> Iterator[dict[str, str]]:
    """Yield a network namespace for each node, or nothing if this machine cannot make them."""
    with ExitStack() as stack:
        names = {}
        with suppress(NoNamespaces):
            first, second = stack.enter_context(two_nodes(None))
            names = {"a": first.name, "b": second.name}
        yield names


def attempt(members: list[Member], uuid: int, victim: Member | None, delay: float) -> list[Any]:
    """Have the members form a group, and kill the victim during that. Returns the living members'
    results."""
    handles = [member.call(handle) for member in members]
    for member in members:
        member.begin(reconfigure, uuid, handles, FORMING)
    if victim is not None:
        time.sleep(delay)
        victim.kill()
    return [member.end() for member in members if member is not victim]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "deaths"),
    [
        *(pytest.param(kind, 6, marks=pytest.mark.full) for kind in ("one", "meeting", "host")),
        pytest.param("one", 300, marks=pytest.mark.long),
        *(pytest.param(kind, 50, marks=pytest.mark.long) for kind in ("two", "meeting", "host")),
    ],
)
@pytest.mark.timeout(3600)
def test_members_die_and_are_replaced(kind: str, deaths: int, way: str) -> None:
    """In turn members are killed or stopped at a random moment, and replaced.

    one      one member of 1 to 3
    two      two of them together
    meeting  one of them, and another one while the members form the next group
    host     member 0, which serves the group's store
    """
    choice = seeds.draws("deaths")
    uuid = 0
    done = 0
    with networks_of_nodes() as networks, Members(way, FORMING, networks=networks) as members:
        group = members.start(NODES)
        early: tuple[int, int, int] | None = None
        for death in range(deaths):
            uuid += 1
            assert attempt(group, uuid, None, 0.0) == [(rank, SIZE) for rank in range(SIZE)]
            if death == 5 and kind != "host":
                early = group[0].call(resources)
            # No step is lost that a survivor has done.
            assert all_call(group, synchronise) == [done] * SIZE
            for member in group:
                member.begin(train)
            time.sleep(choice.uniform(0, LONGEST_TRAINING))
            lost = [group[rank] for rank in victims_of(kind, choice)]
            stops = choice.random() < 0.1
            for member in lost:
                os.kill(member.pid, signal.SIGSTOP if stops else signal.SIGKILL)
            group = [member for member in group if member not in lost]
            said = {member: member.end() for member in group}
            done = max(steps for steps, _ in said.values())
            for member in lost:
                member.kill()
            group += members.start(NODES[: SIZE - len(group)])
            if kind == "meeting":
                uuid += 1
                victim = group[choice.randrange(1, SIZE)]
                found = attempt(group, uuid, victim, choice.uniform(0, LONGEST_TRAINING))
                formed = [each for each in found if isinstance(each, tuple)]
                # Either all members have failed, or all have formed the group before the death.
                assert len(formed) in (0, SIZE - 1), found
                group = [member for member in group if member is not victim]
                done = max(said[member][0] for member in group if member in said)
                group += members.start("b")
        uuid += 1
        assert attempt(group, uuid, None, 0.0) == [(rank, SIZE) for rank in range(SIZE)]
        if early is not None:
            late = group[0].call(resources)
            # A leak of one for each death exceeds these bounds in a long run.
            bounds = [once + deaths // 2 + 16 for once in early]
            assert all(now < bound for now, bound in zip(late, bounds, strict=True)), (early, late)
        all_call(group, dist.destroy_process_group)
