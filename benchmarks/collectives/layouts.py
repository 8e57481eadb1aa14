"""How ranks lie on nodes, and what each node's link must carry for a collective at the least."""

from __future__ import annotations

import re

MIB = 1 << 20
BACKENDS = {"hbm": "hbm, on plain tensors", "gloo": "PyTorch's own backend"}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "fsdp_step")


class Layout:
    """Ranks on nodes: "4x2" are four nodes of two ranks each, "3+1" is a node of three and one of
    one. Raises ValueError for other texts."""

    def __init__(self, text: str):
        if even := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text):
            self.ranks_of = [int(even[2])] * int(even[1])
        elif re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)+", text):
            self.ranks_of = [int(ranks) for ranks in text.split("+")]
        else:
            raise ValueError(f"{text} is no layout, as 4x2 (nodes x ranks of each) or 3+1 is")
        if len(self.ranks_of) < 2:
            raise ValueError(f"{text} has one node; at least two are needed")
        self.text = text

    @property
    def nodes(self) -> int:
        return len(self.ranks_of)

    @property
    def ranks(self) -> int:
        return sum(self.ranks_of)

    def least_bytes(self, collective: str, mib: int) -> float:
        """Return the bytes that links must carry one after another, each at its full rate.

        In an all_reduce a node must send at least (n-1)/n of the tensor for the others to reduce,
        n being the number of nodes, and as much of what it has reduced. Of reduce_scatter's input
        and of all_gather's output it must send or get what belongs to the others; of all_to_all's
        inputs each of its ranks sends the others' shares. A broadcast carries everything. The three
        collectives of a step of FSDP follow one another.
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
        # Each rank's share has whole elements: a few may be left out.
        return tensors[collective] * (mib * MIB // 4 // total * total * 4)

    def least_crossed(self, collective: str, mib: int) -> float:
        """Return the bytes that some direction of some node's link must carry: of a step of FSDP,
        whose collectives are busiest in different directions, those of the two all_gathers."""
        least = self.least_bytes(collective, mib)
        return least * 2 / 3 if collective == "fsdp_step" else least
