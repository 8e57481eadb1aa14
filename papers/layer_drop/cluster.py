"""Ranks on one host, or on two: network namespaces joined by a link of a chosen rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.namespaces import Node, NoNamespaces, two_nodes
from benchmarks.processes import OVER_TCP, rpc_ranks
from torch_hbmcomm.bench.peer import Peer
from torch_hbmcomm.bench.result import Unavailable


class Cluster:
    """Ranks and their nodes.

    ranks: peers that have joined, by rank.
    nodes: at the ends of the link; empty on one host.
    """

    def __init__(self, ranks: Sequence[Peer], nodes: Sequence[Node] = ()) -> None:
        self.ranks = ranks
        self.nodes = nodes

    def all(self, method: str, **arguments: Any) -> list[Any]:
        return together(self.ranks, method, **arguments)

    def received(self) -> list[int]:
        """Return the bytes received over the link by node 0 and by node 1."""
        return [node.received() for node in self.nodes]


def together(ranks: Sequence[Peer], method: str, **arguments: Any) -> list[Any]:
    """Call a method of all ranks at the same time. Return their results."""
    for rank in ranks:
        rank.tell(method, **arguments)
    return [rank.answer() for rank in ranks]


@contextmanager
def one_host(role: str, count: int, **options: Any) -> Iterator[Cluster]:
    """Start ranks on this host.

    Args:
        role: the module that the ranks run
        options: arguments of their join()
    """
    with rpc_ranks(role, count, **options) as ranks:
        yield Cluster(ranks)


@contextmanager
def two_hosts(
    role: str, where: Sequence[int], megabits: int | None, **options: Any
) -> Iterator[Cluster]:
    """Start ranks on two hosts.

    Args:
        role: the module that the ranks run
        where: the node, 0 or 1, of each rank
        megabits: rate of the link each way, in Mbit/s; None: unlimited
        options: arguments of their join()

    Raises Unavailable if this machine cannot make namespaces.
    """
    try:
        with two_nodes(None if megabits is None else f"{megabits}mbit") as nodes:

            def launcher(rank: int) -> list[str]:
                node = nodes[where[rank]]
                variables = OVER_TCP | {
                    "HBMCOMM_NODE_ID": str(where[rank]),
                    "FI_TCP_IFACE": node.link,
                    "GLOO_SOCKET_IFNAME": node.link,
                }
                return [
                    *node.launcher,
                    "env",
                    *(f"{name}={value}" for name, value in variables.items()),
                ]

            with rpc_ranks(role, len(where), launcher, **options) as ranks:
                yield Cluster(ranks, nodes)
    except NoNamespaces as error:
        raise Unavailable(str(error)) from error
