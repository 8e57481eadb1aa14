"""Measures contenders side by side, in one run: the framework of `hbmcomm bench`.

`rounds` lets contenders take turns and takes the time of each call, `result` keeps the measurements
and writes them as JSON, `report` shows them. `collectives`, `ddp` and `box` are the commands;
others, on the same framework, are in benchmarks/ of the repository. Nothing here asserts a time,
and outside of this directory only the command line imports it.
"""
