"""The compared communication hooks.

DDP reads the annotations of hooks, which must not be strings. So this module does not import
annotations from __future__.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm

BUCKET_MIB = {"PowerSGD": 1 << 20}
"""Sizes of DDP's buckets, if not DDP's default. PowerSGD gets one bucket for all: it starts
allreduces in callbacks, and with two buckets their order could differ between ranks."""

_RANK = 4  # rank of PowerSGD's approximations
_VANILLA = 2  # uncompressed first steps of PowerSGD; PyTorch's minimum


def register(
    replica: DistributedDataParallel, hook: str, terms: dict[str, Any]
) -> hbmcomm.LayerDropState | hbmcomm.LowRankState | None:
    """Register a hook. Return its state if it is "layer_drop" or "low_rank", otherwise None.

    hook: "none", "layer_drop", "low_rank", "bf16" or "PowerSGD".
    terms: arguments of LayerDrop or LowRank.
    """
    group = replica.process_group
    if hook == "layer_drop":
        dropping = hbmcomm.LayerDropState(replica, hbmcomm.LayerDrop(**terms), log_every=None)
        replica.register_comm_hook(dropping, hbmcomm.layer_drop_hook)
        return dropping
    if hook == "low_rank":
        low_rank = hbmcomm.LowRankState(replica, hbmcomm.LowRank(**terms), log_every=None)
        replica.register_comm_hook(low_rank, hbmcomm.low_rank_hook)
        return low_rank
    if hook == "bf16":
        replica.register_comm_hook(group, _bfloat16)
    elif hook == "PowerSGD":
        power = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=_RANK, start_powerSGD_iter=_VANILLA
        )
        replica.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    return None


def _bfloat16(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call PyTorch's bf16_compress_hook. Without a GPU, DDP refuses a hook of that name."""
    return default_hooks.bf16_compress_hook(group, bucket)
