"""Layer dropping beside plain training: the share of the communication that it saves, and its
price.

After Lee et al. (2020), "Communication optimization schemes for accelerating distributed deep
learning systems", section 6: Table 1 and Figs. 5 to 14 in small. Ranks are processes of their own
that do what they are told (`bench/peer.py`); "hosts" are two network namespaces with a cable
between them. Torch is imported by the ranks alone.
"""
