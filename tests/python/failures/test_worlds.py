"""Groups of processes that share no MPI world: they connect by TCP links."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.cases import cases
from harness.fates import Ranks, Said
from harness.jobs import run
from harness.network import enter_namespace, free_port, own_connections
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.distributed_c10d import _get_default_group

import torch_hbmcomm
from benchmarks.namespaces import Node, NoNamespaces, two_nodes

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

LIMIT = 120.0
TIMEOUT = timedelta(seconds=LIMIT)


def form(store: Store | Path, rank: int, size: int) -> None:
    if isinstance(store, Path):
        store = FileStore(str(store), size)
    dist.init_process_group("hbm", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def use(rank: int, size: int) -> None:
    """Run collectives and messages, and compare the results with the expected ones."""
    numbers = torch.arange(size) + 1.0
    for count in (1, 100_000):
        data = torch.full((count,), rank + 1.0)
        dist.all_reduce(data)
        assert torch.equal(data, torch.full((count,), float(numbers.sum())))
        dist.reduce(data.fill_(rank + 1.0), 0)
        if rank == 0:
            assert torch.equal(data, torch.full((count,), float(numbers.sum())))
        dist.broadcast(data.fill_(rank), size - 1)
        assert torch.equal(data, torch.full((count,), size - 1.0))
        got = [torch.empty(count) for _ in range(size)]
        dist.all_gather(got, torch.full((count,), rank + 1.0))
        assert torch.equal(torch.stack(got)[:, -1], numbers)
        dist.gather(torch.full((count,), rank + 2.0), got if rank == 0 else None)
        if rank == 0:
            assert torch.equal(torch.stack(got)[:, 0], numbers + 1)
        share = torch.empty(count)
        dist.scatter(share, [each * 3 for each in got] if rank == 0 else None)
        assert torch.equal(share, torch.full((count,), (rank + 2.0) * 3))
        dist.reduce_scatter_tensor(share, torch.arange(size).repeat_interleave(count) + 1.0 * rank)
        expected = float(size * rank + sum(range(size)))
        assert torch.equal(share, torch.full((count,), expected))
        exchanged = torch.empty(size * count)
        dist.all_to_all_single(exchanged, torch.full((size * count,), rank + 1.0))
        assert torch.equal(exchanged, numbers.repeat_interleave(count))
        sent = dist.isend(torch.full((count,), rank + 1.0), (rank + 1) % size)
        dist.recv(share, (rank - 1) % size)
        assert torch.equal(share, torch.full((count,), (rank - 1) % size + 1.0))
        assert sent is not None
        sent.wait()
        if rank == 0:
            senders = [dist.recv(share) for _ in range(1, size)]
            assert sorted(senders) == list(range(1, size))
        else:
            dist.send(torch.full((count,), rank + 1.0), 0)
        dist.barrier()
    ends = dist.new_group([0, size - 1], timeout=TIMEOUT)
    if rank in (0, size - 1):
        data = torch.full((3,), rank + 1.0)
        dist.all_reduce(data, group=ends)
        assert torch.equal(data, torch.full((3,), size + 1.0))


def form_and_use(store: Path, rank: int, size: int) -> None:
    form(store, rank, size)
    use(rank, size)
    dist.destroy_process_group()


def form_pairs_first(pipe: Connection, rank: int, folder: Path, size: int) -> None:
    """Form a group of the even ranks, or of the odd ranks. Then form groups of all ranks."""
    form_and_use(folder / f"half{rank % 2}", rank // 2, size // 2)
    for turn in range(2):
        form_and_use(folder / f"all{turn}", rank, size)
    form_and_use(folder / f"again{rank % 2}", rank // 2, size // 2)


@pytest.mark.parametrize(
    "layout", cases(["aabb", "abba", "abcd", "aaaabbbb"], quick=["aabb", "abcd"])
)
@pytest.mark.parametrize("transport", cases(["auto", "mpi"], quick=["auto"]))
def test_two_groups_of_their_own_form_one_group(
    layout: str, transport: str, tmp_path: Path
) -> None:
    """The halves have MPI worlds of their own, if they are on two nodes, or no world."""
    size = len(layout)
    with Ranks(
        size,
        form_pairs_first,
        tmp_path,
        size,
        layout=layout,
        environment={"HBMCOMM_NODE": transport},
    ) as ranks:
        said = ranks.hear(*range(size), limit=LIMIT)
    assert [each.text for each in said] == [""] * size


def await_death() -> str:
    """Run collectives until one fails. Return the error's text."""
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except dist.DistBackendError as error:
        _get_default_group().abort()
        dist.destroy_process_group()
        return str(error)


def welcome(pipe: Connection, rank: int, folder: Path) -> None:
    """Let process 2 join processes 0 and 1. After its death let process 3 join them."""
    if rank < 2:
        form_and_use(folder / "old", rank, 2)
        pipe.send("ready")
    pipe.recv()
    if rank < 3:
        form(folder / "first", rank, 3)
        use(rank, 3)
        pipe.send("ready")
        if rank == 2:
            pipe.recv()
        pipe.send(await_death())
    if rank < 2:
        form_and_use(folder / "survivors", rank, 2)
    form_and_use(folder / "second", min(rank, 2), 3)


@pytest.mark.parametrize("layout", cases(["abcc", "abaa"], quick=["abcc"]))
def test_a_newcomer_joins_and_its_successor_too(layout: str, tmp_path: Path) -> None:
    with Ranks(4, welcome, tmp_path, layout=layout) as ranks:
        ranks.hear(0, 1, limit=LIMIT)
        ranks.tell(0, 1, 2)
        ranks.hear(0, 1, 2, limit=LIMIT)
        ranks.signal(2, signal.SIGKILL)
        for text in ranks.hear(0, 1, limit=LIMIT):
            assert re.search(r"rank 2 \(pid \d+ on \S+\)( of .*)? has died", text), text
        ranks.tell(3)
        said = ranks.hear(0, 1, 3, limit=LIMIT)
    assert [each.text for each in said] == [""] * 3


def welcome_over_the_network(pipe: Connection, rank: int, folder: Path, nodes: list[Node]) -> None:
    """Let process 2, in a network namespace of its own, join processes 0 and 1. Process 0 also
    serves a box, to which all connect."""
    enter_namespace(nodes[rank // 2].name)
    if rank < 2:
        form_and_use(folder / "old", rank, 2)
    os.environ["HBMCOMM_PARAMETER_SERVER"] = "auto"
    form_and_use(folder / "all", rank, 3)


def have_ipv4(node: Node) -> None:
    """Leave the node as it is."""


def have_ipv6_alone(node: Node) -> None:
    try:
        configure(node, f"address add fd77::{node.address[-1]}/64 dev {node.link} nodad")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no IPv6 here: {error.stderr}")
    configure(node, f"address delete {node.address}/24 dev {node.link}")


def configure(node: Node, words: str) -> None:
    """Call ip(8) for the node's network."""
    command = ["ip", "-n", node.name, *words.split()]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("prepare", [have_ipv4, have_ipv6_alone])
def test_ranks_of_two_networks_connect(prepare: Callable[[Node], None], tmp_path: Path) -> None:
    try:
        with two_nodes(None) as nodes:
            for node in nodes:
                prepare(node)
            with Ranks(3, welcome_over_the_network, tmp_path, nodes, layout="abc") as ranks:
                said = ranks.hear(0, 1, 2, limit=LIMIT)
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert [each.text for each in said] == [""] * 3


PORTS = range(41000, 41009)
HIDDEN = "10.78.0.1"  # an address of both nodes


def listen_where_told(pipe: Connection, rank: int, folder: Path, nodes: list[Node]) -> None:
    node = nodes[rank // 2]
    enter_namespace(node.name)
    os.environ |= {"HBMCOMM_PORTS": "41000-41008", "HBMCOMM_INTERFACES": node.link}
    handle = torch_hbmcomm.reconfigure_handle().split()
    assert node.address in handle and HIDDEN not in handle, handle
    if rank < 2:
        form_and_use(folder / "old", rank, 2)
    form(folder / "all", rank, 3)
    use(rank, 3)
    if rank == 2:  # has not started MPI, which uses other ports
        ends = own_connections()
        assert len(ends) > 2, ends
        for local, remote, _ in ends:
            assert local in PORTS or remote in PORTS, ends
    dist.destroy_process_group()


@pytest.mark.full
def test_hbm_listens_at_the_chosen_ports_and_interfaces(tmp_path: Path) -> None:
    try:
        with two_nodes(None) as nodes:
            for node in nodes:
                configure(node, "link add hidden type veth peer name end")
                configure(node, f"address add {HIDDEN}/24 dev hidden")
                configure(node, "link set hidden up")
            with Ranks(3, listen_where_told, tmp_path, nodes, layout="abc") as ranks:
                said = ranks.hear(0, 1, 2, limit=LIMIT)
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert [each.text for each in said] == [""] * 3


MEET = """
import os
import torch.distributed as dist
os.environ["HBMCOMM_NODE_ID"] = os.environ["RANK"]
dist.init_process_group("hbm")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_process_that_finds_no_port_warns() -> None:
    start = f'RANK=1 {sys.executable} -c "$1" & RANK=0 {sys.executable} -c "$1"; wait $!'
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        finished = run(
            ["sh", "-ec", start, "sh", MEET],
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            HBMCOMM_PORTS=f"{port}-{port}",
        )
    assert finished.code == 0, finished.output
    cause = f"cannot listen for them: Address already in use (at every port of HBMCOMM_PORTS={port}"
    assert finished.output.count(cause) == 1, finished.output


class EndingStore(Store):
    """Ends this process when it has published its address for the links."""

    def __init__(self, below: Store) -> None:
        super().__init__()
        self.below = below

    def set(self, key: str, value: str) -> None:
        self.below.set(key, value)
        if "/links/" in key:
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, key: str) -> bytes:
        return self.below.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.below.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.below.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self.below.check(keys)


def die_before_the_links(pipe: Connection, rank: int, folder: Path, victim: int) -> str:
    """Form a group of ranks 0 and 1, then one of all three, in which the victim dies.

    Afterwards the survivors form a group. Return the error of the second group.
    """
    if rank < 2:
        form_and_use(folder / "old", rank, 2)
    store: Store = FileStore(str(folder / "three"), 3)
    if rank == victim:
        store = EndingStore(store)
    text = ""
    try:
        form(store, rank, 3)
    except dist.DistBackendError as error:
        text = str(error)
    living = [each for each in range(3) if each != victim]
    form_and_use(folder / "survivors", living.index(rank), 2)
    return text


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_before_it_connects_is_named(victim: int, tmp_path: Path) -> None:
    living = [rank for rank in range(3) if rank != victim]
    with Ranks(3, die_before_the_links, tmp_path, victim, layout="abc") as ranks:
        said: list[Said] = ranks.hear(*living, limit=LIMIT)
    for each in said:
        assert each.error == "", each
        assert re.search(rf"rank {victim} \(pid \d+ on \S+\)( of .*)? has died", each.value), each


def count_resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def form_again_and_again(pipe: Connection, rank: int, folder: Path) -> list[tuple[int, int]]:
    if rank < 2:
        form_and_use(folder / "old", rank, 2)
    counts = []
    for turn in range(20):
        form(folder / f"turn{turn}", rank, 3)
        data = torch.ones(1000)
        dist.all_reduce(data)
        assert float(data.sum()) == 3000
        dist.barrier()
        dist.destroy_process_group()
        counts.append(count_resources())
    return counts


def test_groups_in_turn_keep_no_descriptors_and_threads(tmp_path: Path) -> None:
    with Ranks(3, form_again_and_again, tmp_path, layout="abc") as ranks:
        said: list[Said] = ranks.hear(0, 1, 2, limit=LIMIT)
    for each in said:
        assert each.error == "", each
        for counts in zip(*each.value, strict=True):  # the descriptors, then the threads
            # A thread of the last group may still be ending, so one count proves nothing.
            assert min(counts[10:]) <= max(counts[:5]), each.value
