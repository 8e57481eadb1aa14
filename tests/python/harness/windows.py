"""Windows of ranks of a pool (PyTorch 2.14 and later)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from harness import beyond_gloo
from harness.context import Context
from torch_hbmcomm import memory

new_window: Any = getattr(dist, "_new_window", None)
supports_window: Any = getattr(dist, "_supports_window", None)

MARKS = [
    beyond_gloo,
    pytest.mark.skipif(new_window is None, reason="PyTorch 2.14 brought windows"),
]
COUNT = 1000
LARGE = 10 << 20  # elements of float32: more than a poll of an operation copies


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros that other ranks can write."""
    return memory.empty(shape, dtype).zero_()


def timeout(operation: str, milliseconds: int) -> Any:
    """Return the options of a "Put", "Signal" or "WaitSignal" with a timeout."""
    options = getattr(_distributed_c10d, f"{operation}Options")()
    options.timeout = timedelta(milliseconds=milliseconds)
    return options


def refusal(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def neighbours(context: Context) -> tuple[int, int]:
    """Return the next rank and the previous rank of a ring."""
    return (context.rank + 1) % context.size, (context.rank - 1) % context.size


def check_signals(context: Context, window: Any) -> None:
    """Check that the window works on all ranks."""
    for peer in range(context.size):
        window.signal(peer, False)
    for peer in range(context.size):
        window.wait_signal(peer, False)
