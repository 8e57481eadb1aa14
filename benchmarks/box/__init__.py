"""The memory box compared with bounds that this machine sets, and with rival libraries.

Each contender is a process that executes commands. The parent process only sends the commands. Only
the peer of PyTorch's RPC imports torch.
"""
