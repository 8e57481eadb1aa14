"""The link between two machines is cut: for good, and for a while."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.network import enter_namespace
from harness.pool import processes

from benchmarks.namespaces import Node, NoNamespaces, address, two_nodes
from torch_hbmcomm import Options

pytestmark = [beyond_gloo, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]

TIMEOUT = 60.0  # seconds
HEARTBEAT = 3.0  # seconds: the least allowed value
LIMIT = 120.0  # seconds, for a rank to say something
PORT = 29500  # in a namespace of its own
LARGE = 100_000  # elements


def add_up(pipe: Connection, rank: int, node: Node, heartbeat: float | None) -> None:
    """Run and check allreduces until any rank gets a message, or an allreduce fails."""
    enter_namespace(node.name)
    os.environ |= {"HBMCOMM_NODE_ID": str(rank)}
    os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": node.link}
    torch.set_num_threads(1)
    dist.init_process_group(
        "hbm",
        init_method=f"tcp://{address(0)}:{PORT}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT),
        pg_options=Options(heartbeat_timeout=heartbeat),
    )
    turn, stop = 0, False
    try:
        while not stop:
            turn += 1
            found = torch.arange(LARGE) % 1000 * (rank + turn)
            expected = torch.arange(LARGE) % 1000 * (2 * turn + 1)
            found[0] = pipe.poll()
            dist.all_reduce(found)
            stop = bool(found[0] > 0)
            assert torch.equal(found[1:], expected[1:]), f"turn {turn} gave another sum"
            if turn == 10:
                pipe.send("at work")
        pipe.send(("stopped", turn))
    except dist.DistError as error:
        pipe.send((str(error), time.monotonic()))
    dist.destroy_process_group()


@contextmanager
def at_work(heartbeat: float | None) -> Iterator[tuple[Sequence[Node], list[Connection]]]:
    """Start two ranks in add_up(), each on its own node. At the end both must exit normally."""
    ranks: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        with two_nodes(None) as nodes:
            try:
                for rank, node in enumerate(nodes):
                    ours, theirs = processes.Pipe()
                    process: BaseProcess = processes.Process(
                        target=add_up, args=(theirs, rank, node, heartbeat)
                    )
                    process.start()
                    theirs.close()
                    ranks.append(process)
                    pipes.append(ours)
                assert [hear(pipe) for pipe in pipes] == ["at work"] * 2
                yield nodes, pipes
                for process in ranks:
                    process.join(LIMIT)
                    assert process.exitcode == 0
            finally:
                for process in ranks:
                    process.kill()
                    process.join()
    except NoNamespaces as error:
        pytest.skip(str(error))


def hear(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT), "it says nothing"
    return pipe.recv()


def test_the_heartbeat_ends_before_the_timeout() -> None:
    with at_work(HEARTBEAT) as (nodes, pipes):
        cut = time.monotonic()
        nodes[0].cut()
        for rank, pipe in enumerate(pipes):
            text, seen = hear(pipe)
            print(f"rank {rank} after {seen - cut:.1f} s: {text}")
            assert re.search(rf"the machine of rank {1 - rank} .* has not answered", text), text
            assert HEARTBEAT / 2 < seen - cut < TIMEOUT / 2


def test_work_continues_when_the_link_is_back() -> None:
    """Cut the link for longer than the store's timeout, but shorter than the group's timeout."""
    with at_work(None) as (nodes, pipes):
        nodes[0].cut()
        time.sleep(12)
        nodes[0].mend()
        pipes[0].send("stop")
        (word, turns), (other, others) = (hear(pipe) for pipe in pipes)
        assert word == other == "stopped", (turns, others)
        assert turns == others
