"""The memory box against the bounds of this machine, and its rivals.

Each contender is a process of its own, and does what it is told: the parent only gives turns.
Nothing here imports torch but the peer of PyTorch's RPC.
"""
