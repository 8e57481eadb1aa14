"""Measures contenders side by side, in one run: the framework of `hbmcomm bench`.

`rounds` lets contenders take turns and takes the time of each call. `result` keeps the measurements
and writes them as JSON, and `report` shows them. `collectives`, `ddp` and `box` are the commands;
others, on the same framework, are in benchmarks/ and papers/ of the repository. Nothing here
asserts a time. In the package, only the command line imports this directory.
"""
