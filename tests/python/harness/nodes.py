"""Ranks of one machine as ranks of several nodes, and the result of a reduction over nodes.

A layout names each rank's node: "aab" is a node of ranks 0 and 1, and one of rank 2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.context import Context
from harness.reference import reduced
from harness.worker import form_groups

_gloo: dist.ProcessGroup | None = None  # of this rank


def on_nodes(context: Context, layout: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Run `call` in a rank of a bare pool. In the first call, form the rank's groups."""
    global _gloo
    if _gloo is None:
        os.environ["HBMCOMM_NODE_ID"] = layout[context.rank]
        _gloo = form_groups(context.folder, context.rank, context.size, timedelta(seconds=60))
    context.gloo = _gloo
    return call(context, *arguments)


def reduced_over_nodes(inputs: Sequence[torch.Tensor], name: str, layout: str) -> torch.Tensor:
    """Reduce every rank's input: first each node's ranks in order, then the nodes in order.

    Each stage rounds once. A mean of integers is exact. Any other mean divides the sum of the
    nodes' sums. There is one exception, for types below 32 bits if any node has several ranks: each
    node's sum is divided before it is rounded.
    """
    dtype, ranks = inputs[0].dtype, len(inputs)
    nodes = [
        [inputs[rank] for rank, its in enumerate(layout) if its == node]
        for node in dict.fromkeys(layout)
    ]
    floating = dtype.is_floating_point or dtype.is_complex
    if len(nodes) == 1 or (name == "avg" and not floating):
        return reduced(inputs, name)
    narrow = floating and dtype.itemsize < (8 if dtype.is_complex else 4)
    within = between = name
    if name == "avg" and narrow and len(nodes) < ranks:
        between = "sum"
    elif name == "avg":
        within = "sum"
    elif name == "premul_sum":
        between = "sum"
    return reduced([reduced(members, within, ranks) for members in nodes], between, ranks)
