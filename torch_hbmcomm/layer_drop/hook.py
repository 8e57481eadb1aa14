"""layer_drop_hook: layer-wise dropping as a communication hook of DistributedDataParallel.

DDP compares the hook's annotations with classes, so they must not be strings: this module does
without `from __future__ import annotations`.
"""

import torch
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm.layer_drop.state import LayerDropState


def layer_drop_hook(
    state: LayerDropState, bucket: GradBucket, *shards: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket but for what waits, as LayerDropState says.

    Register it with ``ddp.register_comm_hook(state, layer_drop_hook)``.

    Raises TypeError for another state, and under FullyShardedDataParallel.
    """
    if shards or not isinstance(bucket, GradBucket):
        raise TypeError(
            "layer_drop_hook is for DistributedDataParallel, and FullyShardedDataParallel has "
            "called it: there each rank has a part of the gradients only"
        )
    if not isinstance(state, LayerDropState):
        raise TypeError(
            "layer_drop_hook is registered with a LayerDropState, not with "
            f"{type(state).__name__}: ddp.register_comm_hook(LayerDropState(...), layer_drop_hook)"
        )
    return state.exchange(bucket)
