"""Layouts of ranks on nodes, and the least bytes that a collective sends over the busiest link."""

from __future__ import annotations

import re

MIB = 1 << 20
WITHOUT = "hbm without leaders"
BACKENDS = {
    "hbm": "hbm, on plain tensors",
    WITHOUT: 'hbm with Options(transport="mpi"): MPI between all ranks, also within a node',
    "gloo": "PyTorch's own backend",
}
PHASES = {
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "broadcast": 1,
    "all_to_all": 1,
    "fsdp_step": 3,
}
"""The phases of each collective: in a phase, data cross a link that other ranks need for the next
phase."""
COLLECTIVES = tuple(PHASES)


class Layout:
    """Ranks on nodes. "4x2" is four nodes of two ranks each; "3+1" is nodes of three and of one.

    Raises ValueError for other texts, and for fewer than two nodes.
    """

    def __init__(self, text: str):
        if even := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text):
            self.ranks_of = [int(even[2])] * int(even[1])
        elif re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)+", text):
            self.ranks_of = [int(ranks) for ranks in text.split("+")]
        else:
            raise ValueError(f"{text} is no layout: write 4x2 (nodes x ranks of each) or 3+1")
        if len(self.ranks_of) < 2:
            raise ValueError(f"layout {text} has one node: name at least two")
        self.text = text

    @property
    def nodes(self) -> int:
        return len(self.ranks_of)

    @property
    def ranks(self) -> int:
        return sum(self.ranks_of)

    @property
    def lone(self) -> bool:
        """True if each node has one rank, which is then its leader."""
        return self.ranks == self.nodes

    def least_bytes(self, collective: str, mib: float) -> float:
        """Return the least bytes that one direction of the busiest link must carry.

        With n nodes, these are:

        - all_reduce: (n-1)/n of the tensor, which other nodes reduce, and then as many bytes of
          reduced data
        - reduce_scatter, all_gather: the shares of all ranks outside the node with the fewest
          ranks; this node sends (reduce_scatter) or receives (all_gather) them
        - all_to_all: the data that one node's ranks send to ranks of other nodes, for the node that
          sends most
        - broadcast: the tensor
        - a step of FSDP: the sum over its three collectives, which run one after another; their
          busiest links and directions may differ (see least_crossed())
        """
        total = self.ranks
        foreign = (total - min(self.ranks_of)) / total
        tensors = {
            "all_reduce": 2 * (self.nodes - 1) / self.nodes,
            "reduce_scatter": foreign,
            "all_gather": foreign,
            "broadcast": 1.0,
            "all_to_all": max(ranks * (total - ranks) / total for ranks in self.ranks_of),
            "fsdp_step": 3 * foreign,
        }
        # The tensor has a multiple of `total` elements, so that all shares are equal.
        return tensors[collective] * (mib * MIB // 4 // total * total * 4)

    def least_crossed(self, collective: str, mib: float) -> float:
        """Return the bytes that at least one direction of one link must carry.

        The busiest directions of an all_gather and of a reduce_scatter may be opposite. So only the
        two all_gathers of a step of FSDP count.
        """
        least = self.least_bytes(collective, mib)
        return least * 2 / 3 if collective == "fsdp_step" else least
