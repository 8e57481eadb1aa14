"""Links with a delay stay full, because as many bytes are in flight as the link carries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.box_process import ROOT, TOKEN, BoxProcess
from harness.jobs import Job, run
from harness.network import skip_unless_namespaces_work

from benchmarks import programs
from benchmarks.namespaces import DistantLink, distant_link

pytestmark = [beyond_gloo, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]

SCRIPT = Path(__file__).parents[1] / "harness" / "distant_script.py"
LIMIT = 600  # seconds
DELAY = 50  # ms
MEGABITS = 200  # so few that a busy machine sends faster
# The link carries 1.25 MB at a time, and more wait before it. An operation with a fixed window of
# 512 KiB or two chunks of 512 KiB has less in flight.
ENOUGH = 1.5 * (1 << 20)


@pytest.fixture
def link() -> Iterator[DistantLink]:
    with made_link(DELAY) as made:
        yield made


@contextmanager
def made_link(delay: float) -> Iterator[DistantLink]:
    skip_unless_namespaces_work()
    if cause := programs.why_unavailable("delay_link"):
        pytest.skip(cause)
    with distant_link(MEGABITS, delay) as made:
        yield made


def assert_ranks_print(
    expected: str, link: DistantLink, size: int, *command: str | Path, **extra: str
) -> None:
    """Run the command as `size` ranks, half of them on each node. Rank 0 serves the store."""
    with ExitStack() as stack:
        jobs = []
        for rank in range(size):
            node = link.nodes[2 * rank // size]
            job = Job(
                [*node.launcher, *command],
                PYTHONPATH=str(ROOT),
                RANK=str(rank),
                WORLD_SIZE=str(size),
                MASTER_ADDR=link.nodes[0].address,
                MASTER_PORT="29403",  # of the namespace
                HBMCOMM_NODE_ID=node.name,
                UCX_TLS="tcp,self",
                **extra,
            )
            jobs.append(stack.enter_context(job))
        for job in jobs:
            finished = job.finish(LIMIT)
            assert (finished.code, finished.output) == (0, expected)


@pytest.mark.parametrize(
    ("operation", "ranks_of_node"),
    [("all_reduce", 1), ("all_reduce", 2), ("broadcast", 1), ("send", 1), ("all_to_all", 2)],
)
def test_an_operation_fills_the_link(operation: str, ranks_of_node: int, link: DistantLink) -> None:
    assert_ranks_print("done\n", link, 2 * ranks_of_node, sys.executable, SCRIPT, operation)
    assert max(link.most_in_flight()) > ENOUGH


SHORT = """
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("hbm")
dist.all_reduce(torch.ones(10))
dist.destroy_process_group()
"""


def test_ranks_at_a_great_distance_end_without_a_message() -> None:
    """A round trip takes longer than the failure monitor waits at first for an answer."""
    with made_link(150) as link:
        assert_ranks_print("", link, 2, sys.executable, "-c", SHORT)


BOX_CLIENT = """
import sys
import numpy
from torch_hbmcomm import smb
url, token, lanes = sys.argv[1:]
with smb.connect(url, token, "tcp", lanes=int(lanes)) as box:
    data = numpy.ones(32 << 20, numpy.uint8)
    back = numpy.zeros_like(data)
    segment = box.alloc(data.nbytes, temporary=True)
    for _ in range(2):
        segment.write(source=data)
        segment.read(into=back)
    assert (back == data).all()
"""


@pytest.mark.parametrize("lanes", [1, 4])
def test_reads_and_writes_of_a_box_fill_the_link(lanes: int, link: DistantLink) -> None:
    there, here = link.nodes
    options = ("--memory", "64MiB")
    with BoxProcess(*options, host=there.address, port=7777, launcher=there.launcher) as box:
        command = [*here.launcher, sys.executable, "-c", BOX_CLIENT, box.url, TOKEN, str(lanes)]
        finished = run(command, LIMIT, PYTHONPATH=str(ROOT))
        assert finished.code == 0, finished.output
        assert min(link.most_in_flight()) > ENOUGH
