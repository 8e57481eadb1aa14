"""The contenders, in the order of the tables."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.namespaces import Node
from benchmarks.processes import OVER_TCP, mpi_ranks, rpc_ranks
from papers.async_sgd.participants import Participants
from papers.async_sgd.plan import Plan
from torch_hbmcomm.bench.peer import peer

PLAIN = "hbm shm"
ZERO_COPY = "hbm shm zero-copy"
TCP = "hbm tcp"
MPI = "MPI"
MPI_SLEEPING = "MPI sleeping"
MPI_TCP = "MPI tcp"
RPC = "RPC"


@dataclass(frozen=True)
class Place:
    """The location of a server and its workers: this machine, or the two ends of a link."""

    server: Node | None = None
    workers: Node | None = None

    @property
    def host(self) -> str:
        """The address at which the server listens."""
        return "127.0.0.1" if self.server is None else self.server.address

    def node(self, rank: int) -> Node | None:
        """Return the node of a rank, or None on this machine. Rank 0 is the server."""
        return self.workers if rank else self.server


@dataclass(frozen=True)
class Contender:
    """A way to exchange gradients for weights.

    transport: "shm", with shared memory, or "tcp".
    parts: takes the number of workers; returns the needed memory in multiples of the model's size.
    participants: starts a server and a number of workers. Raises Unavailable or PeerFailed.
    ours: True for hbm, whose failure ends the run.
    """

    name: str
    about: str
    transport: str
    parts: Callable[[int], int]
    participants: Callable[[Plan, int, Place], AbstractContextManager[Participants]]
    ours: bool = False


_AT_ITS_END = (
    'if [ "$PMI_RANK" = 0 ]; then node=$1 link=$2; else node=$3 link=$4; fi; shift 4; '
    'FI_TCP_IFACE=$link exec ip netns exec "$node" "$@"'
)
"""A shell script that runs rank 0 in the server's namespace, other ranks in the workers' one."""


@contextmanager
def _box(
    way: str, transport: str, plan: Plan, workers: int, place: Place
) -> Iterator[Participants]:
    with ExitStack() as stack:
        members = []
        for rank in range(1 + workers):
            node = place.node(rank)
            role = ["worker"] if rank else ["server"]
            started = peer("papers.async_sgd.box_peer", node.launcher if node else (), role)
            members.append(stack.enter_context(started))
        yield Participants(
            members,
            server={"host": place.host, "threads": plan.threads},
            worker={"way": way, "transport": transport, "lanes": plan.lanes},
        )


@contextmanager
def _mpi(
    over_tcp: bool, sleeping: bool, plan: Plan, workers: int, place: Place
) -> Iterator[Participants]:
    launcher: list[str] = []
    if place.server is not None and place.workers is not None:
        ends = [part for node in (place.server, place.workers) for part in (node.name, node.link)]
        launcher = ["sh", "-c", _AT_ITS_END, "sh", *ends]
    environment = OVER_TCP if over_tcp else {}
    role = f"papers.async_sgd.mpi_{'sleeping_' if sleeping else ''}rank"
    with mpi_ranks(role, 1 + workers, environment, launcher) as ranks:
        yield Participants(ranks)


@contextmanager
def _rpc(plan: Plan, workers: int, place: Place) -> Iterator[Participants]:
    def launcher(rank: int) -> Sequence[str]:
        node = place.node(rank)
        if node is None:
            return []
        names = [f"{name}_SOCKET_IFNAME={node.link}" for name in ("GLOO", "TP")]
        return [*node.launcher, "env", *names]

    over_link = place.server is not None
    with rpc_ranks(
        "papers.async_sgd.rpc_rank", 1 + workers, launcher, over_link=over_link
    ) as ranks:
        yield Participants(ranks)


def _over_box(name: str, about: str, way: str, transport: str, copies: int) -> Contender:
    """Make a contender over the box.

    copies: the memory that each worker needs, in multiples of the model's size.
    """
    return Contender(
        name,
        f"a box: {about}",
        transport,
        lambda workers: 1 + copies * workers,
        functools.partial(_box, way, transport),
        ours=True,
    )


def _over_mpi(name: str, about: str, transport: str, sleeping: bool = False) -> Contender:
    return Contender(
        name,
        f"MPI_Send and MPI_Recv with rank 0 as the server, over {about}",
        transport,
        lambda workers: 2 + 2 * workers,
        functools.partial(_mpi, transport == "tcp", sleeping),
    )


CONTENDERS = {
    contender.name: contender
    for contender in (
        _over_box(
            PLAIN,
            "the gradients are copied to the worker's buffer, added, the weights copied back",
            "plain",
            "shm",
            copies=3,
        ),
        _over_box(
            ZERO_COPY,
            "the gradients were computed in the buffer; adding and copying back overlap",
            "zero-copy",
            "shm",
            copies=2,
        ),
        _over_mpi(MPI, "shared memory", "shm"),
        _over_mpi(
            MPI_SLEEPING, "shared memory; ranks sleep until it is their turn", "shm", sleeping=True
        ),
        Contender(
            RPC,
            "PyTorch's RPC: a call brings the gradients and returns the weights",
            "shm",
            lambda workers: 1 + 4 * workers,
            _rpc,
        ),
        _over_box(
            TCP, "chunks are sent, added and fetched at the same time", "pipelined", "tcp", copies=3
        ),
        _over_mpi(MPI_TCP, "tcp", "tcp"),
    )
}
