"""Low-rank approximations of gradients with error feedback, after PowerSGD (Vogels et al. 2019).

encoder.py handles a bucket of DDP's from beginning to end. rule.py chooses the ranks of matrices,
and bucket_factors.py computes the factors. torch_hbmcomm/error_feedback does the rest.
"""

from torch_hbmcomm.low_rank.config import LowRank
from torch_hbmcomm.low_rank.hook import LowRankState, low_rank_hook

__all__ = ["LowRank", "LowRankState", "low_rank_hook"]
