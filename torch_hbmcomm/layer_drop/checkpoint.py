from torch_hbmcomm.layer_drop.cache import SavedState
from torch_hbmcomm.layer_drop.cache import own_share as own_share

State = SavedState
