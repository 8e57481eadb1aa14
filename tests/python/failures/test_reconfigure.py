"""Groups whose members change: survivors and newcomers form the next group."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.members import (
    INSTEAD_OF_GLOO,
    LIMIT,
    WAYS,
    Member,
    Members,
    all_call,
    all_reduce,
    assert_joined,
    assert_right,
    handle,
    reconfigure,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

ways = pytest.mark.parametrize("way", WAYS)


def assert_all_name(errors: list[Any], *parts: str) -> None:
    for error in errors:
        assert isinstance(error, RuntimeError), error
        assert any(part in str(error) for part in parts), error


@pytest.mark.parametrize("way", [*WAYS, *INSTEAD_OF_GLOO])
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_and_a_newcomer_form_the_next_group(way: str, victim: int) -> None:
    with Members(way) as members:
        first = members.start("aaa")
        assert_joined(first, 1)
        first[victim].kill()
        living = [member for member in first if member is not first[victim]]
        for error in all_call(living, all_reduce):
            assert f"(pid {first[victim].pid} on" in str(error) and "has died" in str(error)
        assert_joined([*living, *members.start("a")], 2)


@ways
def test_members_come_and_go(way: str) -> None:
    with Members(way) as members:
        a, b, c, d = members.start("aaaa")
        assert_joined([a, b], 1)
        assert_joined([c, d], 1)
        assert_joined([a, b, c, d], 2)  # two groups become one
        assert_joined([d, b, a, c], 3)  # another order
        assert_joined([d, b, a, c], 4)  # the same members
        assert_joined([a, c], 5)
        assert_joined([b], 5)
        assert_joined([b, d, a], 6)


@ways
def test_survivors_of_two_nodes_form_the_next_group(way: str) -> None:
    with Members(way) as members:
        first = members.start("aabb")
        assert_joined(first, 1)
        first[1].kill()
        living = [first[0], first[2], first[3]]
        assert_all_name(all_call(living, all_reduce), "has died")
        assert_joined(living, 2)
        first[0].kill()  # member 0 serves the group's store
        living = living[1:]
        assert_all_name(all_call(living, all_reduce), "has died", "the store is gone")
        assert_joined(living, 3)


@ways
def test_newcomers_join_members_of_two_nodes(way: str) -> None:
    with Members(way) as members:
        first = members.start("aabb")
        assert_joined(first, 1)
        first[3].kill()
        living = first[:3]
        assert_all_name(all_call(living, all_reduce), "has died")
        living += members.start("b")
        assert_joined(living, 2)
        living[0].kill()  # member 0 serves the group's store
        assert_all_name(
            all_call(living[1:], all_reduce),
            "has died",
            "the store is gone",
            "the TCP connection to rank 0 of",
        )
        assert_joined([*members.start("ac"), *living[1:]], 3)


@ways
def test_a_set_of_handles_has_one_order(way: str) -> None:
    with Members(way) as members:
        all_members = members.start("aaaa")
        handles = {member.call(handle) for member in all_members}
        found = all_call(all_members, reconfigure, 1, handles)
        assert sorted(found) == [(rank, 4) for rank in range(4)]
        assert_right(all_members)


def check_left_as_it_was(first: list[Member], errors: list[Any], *parts: str) -> None:
    assert_all_name(errors, *parts)
    assert_right(first)


@ways
def test_a_refused_attempt_leaves_the_group_as_it_was(way: str) -> None:
    with Members(way) as members:
        first = members.start("aa")
        assert_joined(first, 1)
        handles = [member.call(handle) for member in first]
        stranger = members.start("a")[0].call(handle)
        refusals: list[tuple[list[str], str]] = [
            ([], "none of the 0 handles is this process' present one"),
            ([stranger], "none of the 1 handles is this process' present one"),
            ([*handles, handles[0]], "is named twice"),
            ([*handles, "gloo:0:1:0:host:42"], "is no handle of hbm"),
        ]
        for uuid, (named, text) in enumerate(refusals, 2):
            check_left_as_it_was(first, all_call(first, reconfigure, uuid, named), text)
        check_left_as_it_was(
            first, all_call(first, reconfigure, 1, handles), "uuid 1 was already used"
        )
        if way == "again":  # PyTorch's own function takes a text for a list of letters
            one_text = all_call(first, reconfigure, 9, handles[0])
            check_left_as_it_was(first, one_text, "must be a list or a set of texts, not one text")
        # Members with different handles.
        first[0].begin(reconfigure, 10, handles)
        first[1].begin(reconfigure, 10, [*handles, stranger])
        check_left_as_it_was(first, [member.end() for member in first], "different handles")
        assert_joined(first, 11)


def reconfigure_with(arguments: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"uuid": 2, "handles": [handle()], "timeout": timedelta(seconds=LIMIT)}
    torch_hbmcomm.reconfigure(**chosen | arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"uuid": "a"}, "TypeError: reconfigure: uuid must be an integer, not str"),
        ({"uuid": 2**63}, "ValueError: reconfigure: uuid 9223372036854775808 does not fit"),
        ({"timeout": 5}, "TypeError: reconfigure: timeout must be a timedelta, not int"),
        ({"handles": {}}, "TypeError: reconfigure: handles must be a list or a set, not dict"),
        ({"handles": [None]}, "TypeError: reconfigure: each handle must be a text, not NoneType"),
        ({"pg_options": "x"}, "ValueError: pg_options for the backend hbm must be"),
    ],
)
def test_an_argument_of_another_type_is_refused(arguments: dict[str, Any], text: str) -> None:
    """The group stays as it was."""
    with Members("again") as members:
        alone = members.start("a")
        assert_joined(alone, 1)
        assert text in str(alone[0].call(reconfigure_with, arguments))
        assert_right(alone)


def begin_in_a_thread(uuid: int, handles: list[str]) -> None:
    _Pending.work = threading.Thread(target=reconfigure, args=(uuid, handles))
    _Pending.work.start()


def reconfigure_meanwhile() -> None:
    while True:
        with suppress(ValueError):  # the other thread has not begun: there are no handles
            reconfigure(3, [])


def test_a_second_thread_is_refused() -> None:
    with Members("again") as members:
        first, late = members.start("aa")
        handles = [first.call(handle), late.call(handle)]
        first.call(begin_in_a_thread, 2, handles)
        error = first.call(reconfigure_meanwhile)
        assert "another thread of this process is reconfiguring" in str(error), error
        assert late.call(reconfigure, 2, handles) == (1, 2)
        assert_right([first, late])


def make_mesh() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _Pending.work = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])


def collect() -> list[float]:
    whole: list[float] = _Pending.work.full_tensor().tolist()
    return whole


def test_a_mesh_does_not_reach_the_next_group() -> None:
    """Over the next group the parts of the tensor would have another order."""
    with Members("again") as members:
        first = members.start("aa")
        assert_joined(first, 1)
        all_call(first, make_mesh)
        assert all_call(first, collect) == [list(range(6))] * 2
        assert_joined(first[::-1], 2)
        assert_all_name(all_call(first, collect), "registered under the name 1:0")
        all_call(first, make_mesh)
        assert all_call(first, collect) == [list(range(6))] * 2


def split_in_two() -> float:
    part = torch_hbmcomm.split_group(split_ranks=[[0, 2], [1]], timeout=timedelta(seconds=20))
    data = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(data, group=part)
    return data.item()


def test_survivors_and_a_newcomer_split_the_next_group() -> None:
    """The survivors have split a group before."""
    with Members("again") as members:
        first = members.start("aaa")
        assert_joined(first, 1)
        assert all_call(first, split_in_two) == [2.0, 1.0, 2.0]
        living = [*first[:2], *members.start("a")]
        assert_joined(living, 2)
        assert all_call(living, split_in_two) == [2.0, 1.0, 2.0]


def set_variable(name: str, value: str) -> None:
    os.environ[name] = value


@ways
def test_each_member_has_an_agent_of_its_own(way: str, tmp_path: Path) -> None:
    with Members(way, store=tmp_path / "store") as members:
        first = members.start("aab")
        for number, member in enumerate(first):
            member.call(set_variable, "TORCHELASTIC_RUN_ID", f"job {number}")
        assert_joined(first, 1)
        if way == "again":
            assert all_call(first, sum_in_a_subgroup) == [2.0, 2.0, 1.0]


@ways
def test_members_with_another_first_member_are_advised(way: str) -> None:
    with Members(way) as members:
        first = members.start("aa")
        handles = [member.call(handle) for member in first]
        first[0].begin(reconfigure, 1, handles, 5.0)
        first[1].begin(reconfigure, 1, handles[::-1], 5.0)
        assert_all_name([member.end() for member in first], "the same handles in the same order")


@ways
def test_a_late_member_is_named(way: str) -> None:
    with Members(way) as members:
        first = members.start("aa")
        late = members.start("a")[0]
        handles = [member.call(handle) for member in [*first, late]]
        errors = all_call(first, reconfigure, 1, handles, 5.0)
        # On a busy machine rank 0 may not answer rank 1 in time.
        assert_all_name(errors, f"2 (pid {late.pid} on", "did not answer before the timeout")
        assert_joined([*first, late], 2)


@ways
@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_that_dies_before_the_meeting_is_named(way: str, victim: int) -> None:
    with Members(way) as members:
        first = members.start("aaa")
        handles = [member.call(handle) for member in first]
        first[victim].kill()
        living = [member for member in first if member is not first[victim]]
        name = f"rank {victim} (pid {first[victim].pid} on"
        for error in all_call(living, reconfigure, 1, handles):
            assert name in str(error) and "has died" in str(error)
        assert_joined(living, 2)


@ways
@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_that_dies_in_the_meeting_is_named(way: str, victim: int) -> None:
    with Members(way) as members:
        first = members.start("aaa")
        late = members.start("a")[0]  # the first three wait for this one
        handles = [member.call(handle) for member in [*first, late]]
        for member in first:
            member.begin(reconfigure, 1, handles)
        first[victim].kill()
        living = [member for member in first if member is not first[victim]]
        errors = [member.end() for member in living]
        assert_all_name(errors, f"rank {victim} (pid {first[victim].pid} on", "the store")
        assert_joined([*living, late], 2)


def differing(uuid: int, handles: list[str], bad: bool) -> tuple[int, int]:
    """Reconfigure; with `bad`, fail after the meeting."""
    if bad:
        os.environ["HBMCOMM_BIND"] = "wrong"
    try:
        return reconfigure(uuid, handles)
    finally:
        os.environ.pop("HBMCOMM_BIND", None)


@ways
def test_a_member_that_fails_after_the_meeting_fails_all(way: str) -> None:
    with Members(way) as members:
        first = members.start("aaa")
        assert_joined(first, 1)
        handles = [member.call(handle) for member in first]
        for member in first:
            member.begin(differing, 2, handles, member is first[1])
        errors = [member.end() for member in first]
        assert_all_name(errors, 'bind mode "wrong"')
        # No group is left, or an aborted one, until the next attempt.
        for error in all_call(first, all_reduce):
            assert isinstance(error, RuntimeError)
        # A newcomer forms a group with members whose attempt has failed.
        assert_joined([*first, *members.start("a")], 3)


def start_work(count: int) -> None:
    _Pending.work = dist.all_reduce(torch.ones(count), async_op=True)


class _Pending:
    work: Any = None


def end_work() -> str:
    try:
        _Pending.work.wait()
    except RuntimeError as error:
        return str(error)
    return "done"


@ways
def test_works_in_flight_fail(way: str) -> None:
    """Rank 1 has begun an all_reduce that rank 0 never calls."""
    with Members(way) as members:
        first = members.start("aa")
        assert_joined(first, 1)
        first[1].call(start_work, 100_000)
        assert_joined(first, 2)
        text = first[1].call(end_work)
        assert "was reconfigured on rank" in text or "was aborted on rank" in text, text
        assert_right(first)


@ways
def test_a_member_that_is_left_out_gets_an_error(way: str) -> None:
    with Members(way) as members:
        first = members.start("aaa")
        assert_joined(first, 1)
        first[2].begin(all_reduce)
        assert_joined(first[:2], 2)
        error = str(first[2].end())
        assert "was reconfigured on rank" in error or "was aborted on rank" in error, error
        assert_joined([first[2], first[0], first[1]], 3)


def shrink(excluded: int) -> tuple[int, int]:
    dist.shrink_group([excluded])
    return dist.get_rank(), dist.get_world_size()


@ways
def test_the_next_group_names_a_late_rank_and_shrinks(way: str) -> None:
    """Rank 3 of the next group was rank 0 of one rank before."""
    with Members(way, 8.0) as members:
        first = members.start("aaaa")
        assert_joined(first[:3], 1)
        assert_joined([*first[:2], first[3], first[2]], 2)
        errors = all_call([first[0], first[1], first[2]], all_reduce)
        assert_all_name(errors, f"missing ranks: 2 (pid {first[3].pid} on")
        assert_joined(first, 3)
        if way == "again":  # PyTorch's shrink_group needs the store of init_process_group
            first[3].kill()
            assert_all_name(all_call(first[:3], all_reduce), "has died")
            assert all_call(first[:3], shrink, 3) == [(rank, 3) for rank in range(3)]
            assert_right(first[:3])


def test_shrinking_without_a_store_is_advised() -> None:
    with Members("again") as members:
        first = members.start("aaa")
        assert_joined(first, 1)
        first[0].kill()  # member 0 serves the group's store
        assert_all_name(all_call(first[1:], all_reduce), "has died")
        for error in all_call(first[1:], shrink, 0):
            assert 'group "1:0" cannot be made' in str(error), error
            assert "torch_hbmcomm.reconfigure() needs no store of this group" in str(error)
        assert_joined(first[1:], 2)


def pend_with_callback() -> None:
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    _Pending.work = work
    work.get_future().then(lambda future: future.value())


@ways
def test_a_callback_in_flight_does_not_block(way: str) -> None:
    with Members(way) as members:
        first = members.start("aa")
        assert_joined(first, 1)
        first[1].call(pend_with_callback)
        assert_joined(first, 2)
        assert first[1].call(end_work) != "done"


def resources() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and files in /dev/shm."""
    handle()  # ends the stores of earlier groups
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(list(Path("/dev/shm").iterdir())),
    )


def print_into(file: Path) -> None:
    """Send the standard error of this process, also of C++, to this file."""
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), 2)


def settle_below(bounds: tuple[int, int, int]) -> tuple[int, int, int]:
    """Wait until this process has fewer resources than these, at most for a minute."""
    deadline = time.monotonic() + LIMIT
    found = resources()
    while any(map(operator.ge, found, bounds)) and time.monotonic() < deadline:
        time.sleep(0.05)
        found = resources()
    return found


@ways
def test_nothing_grows(way: str, tmp_path: Path) -> None:
    """Form groups. A leak of one resource in each group would exceed the bounds."""
    groups = 16
    with Members(way) as members:
        first = members.start("aab")
        for number, member in enumerate(first):
            member.call(print_into, tmp_path / str(number))
        for uuid in range(1, 4):
            assert_joined(first, uuid)
        before = [member.call(resources) for member in first]
        for uuid in range(4, 4 + groups):
            assert_joined(first, uuid)
        for member, counts in zip(first, before, strict=True):
            bounds = tuple(count + groups for count in counts)
            found = member.call(settle_below, bounds)
            assert all(map(operator.lt, found, bounds)), (before, found)
        all_call(first, dist.destroy_process_group)
    for printed in tmp_path.iterdir():
        assert "TCPStore" not in printed.read_text()


def sum_in_a_subgroup() -> float:
    """Return the sum over all ranks but the last of one for each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = dist.new_group(list(range(size - 1)))
    data = torch.ones(5)
    if rank < size - 1:
        dist.all_reduce(data, group=part)
    return float(data[0])


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2, dtype=torch.float64)


def train(model: torch.nn.Module, ranks: Sequence[int], divisor: int) -> None:
    """Train with the sum of the losses of `ranks`, divided by the divisor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            out = model(torch.full((1, 4), rank + step + 1.0, dtype=torch.float64)).sum()
            (out / divisor).backward()
        optimizer.step()


def reference(size: int) -> list[float]:
    model = linear()
    train(model, range(size), size)
    return [float(p.detach().sum()) for p in model.parameters()]


def train_replicated() -> list[float]:
    model = linear()
    train(DistributedDataParallel(model), [dist.get_rank()], 1)
    return [float(p.detach().sum()) for p in model.parameters()]


def train_sharded() -> list[float]:
    """Train with FSDP2, sharded in two halves of the group, which replicate each other."""
    model = linear()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    train(model, [dist.get_rank()], 1)
    return [float(cast(DTensor, p).full_tensor().sum()) for p in model.parameters()]


def multiply_on_a_mesh() -> float:
    """Return the sum of a product of two DTensors, one of them sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Replicate()])
    return float(cast(DTensor, (rows @ columns).sum()).full_tensor())


@ways
def test_models_and_meshes_over_the_next_group(way: str, tmp_path: Path) -> None:
    with Members(way, store=tmp_path / "store") as members:
        first = members.start("aaa")
        assert_joined(first, 1)
        if way == "again":  # in place, survivors and newcomers must have made as many groups
            assert all_call(first, sum_in_a_subgroup) == [2.0, 2.0, 1.0]
        first[0].kill()
        assert_all_name(all_call(first[1:], all_reduce), "has died")
        living = [*first[1:], *members.start("aa")]
        assert_joined(living, 2)
        assert all_call(living, sum_in_a_subgroup) == [3.0, 3.0, 3.0, 1.0]
        for training in (train_replicated, train_sharded):
            for found in all_call(living, training):
                assert found == pytest.approx(reference(4), rel=1e-12)
        product = torch.arange(32.0).reshape(8, 4) @ torch.arange(12.0).reshape(4, 3)
        assert all_call(living, multiply_on_a_mesh) == [float(product.sum())] * 4
