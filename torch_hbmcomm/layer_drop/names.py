from torch_hbmcomm.layer_drop.buckets import check_dtype as check_dtype
