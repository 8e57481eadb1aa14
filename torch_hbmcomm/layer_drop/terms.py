from torch_hbmcomm.layer_drop.config import LayerDrop as LayerDrop
from torch_hbmcomm.layer_drop.config import Representative as Representative
from torch_hbmcomm.layer_drop.config import Target as Target
