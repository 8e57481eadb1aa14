"""Sends all gradients and residuals whole, in their own type or as bfloat16."""

from __future__ import annotations

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.encoder import Accumulated, Encoded


def encode_whole(bucket: Accumulated, averager: Averager) -> Encoded:
    """Choose all parameters of a bucket, except those whose gradient is zero on all ranks.

    DDP discards the average of a parameter that no rank used, so its residual has to stay.
    """
    numbers = torch.tensor(
        [bucket.residual_sums, [size == 0 for size in bucket.sizes]], dtype=torch.float64
    )
    sums, zeros = averager.agree(numbers).tolist()
    whole = [index for index, zero in enumerate(zeros) if zero != 1]
    return Encoded(whole, None, sums, numbers.nbytes)
