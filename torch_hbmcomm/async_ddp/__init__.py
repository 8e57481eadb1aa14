"""Asynchronous training of unmodified DistributedDataParallel: running totals in memory boxes."""

from torch_hbmcomm.async_ddp.hook import async_hook
from torch_hbmcomm.async_ddp.state import AsyncState

__all__ = ["AsyncState", "async_hook"]
