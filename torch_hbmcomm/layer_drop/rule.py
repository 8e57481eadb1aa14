from torch_hbmcomm.layer_drop.decision import DropRule

Rule = DropRule
