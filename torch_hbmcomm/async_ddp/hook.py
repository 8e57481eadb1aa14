"""The hook. DDP reads its annotations, which here must not be strings (no __future__ import)."""

import torch
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm.async_ddp.state import AsyncState


def async_hook(state: AsyncState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """``ddp.register_comm_hook(state, async_hook)``; AsyncState says what it does."""
    return state.exchange(bucket)
