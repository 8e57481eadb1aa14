"""Asynchronous training of unmodified DistributedDataParallel: running totals in memory boxes."""

from torch_hbmcomm.async_ddp.state import AsyncState, async_hook

__all__ = ["AsyncState", "async_hook"]
