from torch_hbmcomm.layer_drop.decision import Layer as Layer
from torch_hbmcomm.layer_drop.decision import Shape as Shape
from torch_hbmcomm.layer_drop.decision import layers_of as layers_of
