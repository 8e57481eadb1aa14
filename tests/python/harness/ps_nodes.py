"""Ranks of a bare pool that train in nodes, with `aggregate="node"` and the group's own box.

A layout names each rank's node, as in harness.nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.context import Context
from harness.group_boxes import form
from torch_hbmcomm import ParameterServer
from torch_hbmcomm.parameter_server import Downpour

WAIT_SECONDS = 60.0  # seconds for other workers


def in_nodes(context: Context, layout: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Run `call` in a rank. In the first call, form the default group."""
    if not dist.is_initialized():
        os.environ["HBMCOMM_NODE_ID"] = layout[context.rank]
        form(context, "auto")
    return call(context, *arguments)


@contextmanager
def node_server(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Iterator[ParameterServer]:
    """Yield a parameter server that sums all deltas, by default of plain SGD at a rate of 1."""
    with ParameterServer(
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=1.0),
        **{"rule": Downpour("sum"), "aggregate": "node", "timeout": WAIT_SECONDS, **options},
    ) as ps:
        yield ps


def settle_all(ps: ParameterServer) -> None:
    """End the training, and take the weights that have the changes of all workers."""
    ps.finish(wait=True)
    ps.pull()
