"""Layer-wise dropping with error feedback."""

from torch_hbmcomm.layer_drop.hook import layer_drop_hook
from torch_hbmcomm.layer_drop.state import LayerDropState
from torch_hbmcomm.layer_drop.terms import LayerDrop

__all__ = ["LayerDrop", "LayerDropState", "layer_drop_hook"]
