"""Measures contenders side by side, in one run, interleaved round-robin.

`run.py` is the way in. Nothing here asserts a time, and nothing here knows the command line.
"""
