"""Low-rank approximations of gradients with error feedback, after PowerSGD (Vogels et al. 2019).

encoder.py has a bucket of DDP's, from top to bottom; rule.py chooses the ranks; bucket_factors.py
computes the factors. torch_hbmcomm/error_feedback does the rest.
"""

from torch_hbmcomm.low_rank.config import LowRank
from torch_hbmcomm.low_rank.hook import LowRankState, low_rank_hook

__all__ = ["LowRank", "LowRankState", "low_rank_hook"]
