"""Layer-wise dropping with error feedback (Lee et al. 2020).

decision.py decides which layers are sent, under DDP and at a parameter server. encoder.py applies
the decisions to a bucket of DDP's. torch_hbmcomm/error_feedback does the rest.
"""

from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.hook import LayerDropState, layer_drop_hook

__all__ = ["LayerDrop", "LayerDropState", "layer_drop_hook"]
