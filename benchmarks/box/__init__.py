"""The memory box compared with the bounds of this machine and with its rivals.

Each contender is a process that executes commands. The parent process only schedules them. Only the
peer of PyTorch's RPC imports torch.
"""
