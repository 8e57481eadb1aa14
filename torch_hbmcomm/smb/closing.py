from torch_hbmcomm.smb.closeable import Closeable, close_at_exit

Closing = Closeable
at_exit = close_at_exit
