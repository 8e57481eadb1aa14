"""The hook. DDP reads its annotations, which here must not be strings (no __future__ import)."""

import torch
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm.layer_drop.state import LayerDropState


def layer_drop_hook(
    state: LayerDropState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """``ddp.register_comm_hook(state, layer_drop_hook)``; LayerDropState says what it does."""
    if not isinstance(state, LayerDropState):
        raise TypeError(
            "layer_drop_hook is registered with a LayerDropState, not with "
            f"{type(state).__name__}: ddp.register_comm_hook(LayerDropState(...), layer_drop_hook)"
        )
    return state.exchange(bucket)
