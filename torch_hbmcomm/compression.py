"""bf16_hook: sends gradients as bfloat16.

DDP compares the hook's annotations with classes, so they must not be strings: this module has no
`from __future__ import annotations`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from torch_hbmcomm.groups import chosen_group


def bf16_hook(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as bfloat16 over the ranks of `group`.

    group: the model's group; None means the default group

    Register it with ``ddp.register_comm_hook(group, bf16_hook)``. It does the same as PyTorch's
    bf16_compress_hook, which DDP refuses on machines without a GPU. Rounding errors are lost;
    low_rank_hook with LowRank(ratio=0, wire_dtype=torch.bfloat16) keeps them for the next step.
    """
    chosen = chosen_group(group)
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(chosen.size())
    work = dist.all_reduce(narrow, group=chosen, async_op=True)

    def widen(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises the allreduce's error
        return buffer.copy_(narrow)

    done: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return done
