"""The memory box against its bounds and its rivals, in one run.

Whoever is measured is a process of its own (`peer.py`), and does what it is told: the parent only
gives turns. Nothing here imports torch but the peer of PyTorch's RPC.
"""
