"""Ranks of one machine as ranks of several nodes, and what a reduction over nodes must give.

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
    """Calls `call(context, *arguments)` on a rank of a bare pool, with its groups formed."""
    global _gloo
    if _gloo is None:
        os.environ["HBMCOMM_NODE_ID"] = layout[context.rank]
        _gloo = form_groups(context.folder, context.rank, context.size, timedelta(seconds=60))
    context.gloo = _gloo
    return call(context, *arguments)


def by_leaders(dtype: torch.dtype, name: str) -> bool:
    """Whether an allreduce is reduced within the nodes first; else over all ranks at once."""
    wide = (dtype.is_complex and dtype.itemsize >= 8) or dtype in (torch.float32, torch.float64)
    return name != "avg" or wide


def reduced_over_nodes(inputs: Sequence[torch.Tensor], name: str, layout: str) -> torch.Tensor:
    """The allreduce of every rank's input: in the order of each node's ranks, then of the nodes.

    Each stage rounds once. The mean is the sum of the nodes' sums, divided.
    """
    if not by_leaders(inputs[0].dtype, name):
        return reduced(inputs, name)
    within = "sum" if name == "avg" else name
    between = "sum" if name in ("avg", "premul_sum") else name
    parts = []
    for node in dict.fromkeys(layout):
        members = [rank for rank, its in enumerate(layout) if its == node]
        parts.append(reduced([inputs[rank] for rank in members], within))
    total = reduced(parts, between)
    if name != "avg":
        return total
    if total.dtype.is_complex:
        return torch.view_as_complex(torch.view_as_real(total) / len(inputs))
    return total / len(inputs)
