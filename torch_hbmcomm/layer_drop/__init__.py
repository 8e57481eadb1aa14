"""Layer-wise dropping with error feedback (Lee et al. 2020).

Read it from state.py downwards: a bucket of gradients becomes layers (buckets.py), which are added
to a cache (cache.py); ranks average what the decision needs (averaging.py). By default low_rank.py
approximates what waits; decision.py says which layers are sent whole with the other targets.
"""

from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.hook import layer_drop_hook
from torch_hbmcomm.layer_drop.state import LayerDropState

__all__ = ["LayerDrop", "LayerDropState", "layer_drop_hook"]
