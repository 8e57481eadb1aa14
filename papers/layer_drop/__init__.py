"""Layer dropping compared with plain training: the communication that it saves, and its cost.

After Lee et al. (2020), "Communication optimization schemes for accelerating distributed deep
learning systems", section 6: Table 1 and Figs. 5 to 14, on a small scale. Ranks are processes that
execute commands (`bench/peer.py`). "Hosts" are two network namespaces joined by a link. Only the
ranks import torch.
"""
