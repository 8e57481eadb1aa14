"""Comparisons of torch_hbmcomm with others; README.md lists the commands.

They use the framework of `torch_hbmcomm.bench`, and run from a checkout: python -m benchmarks.NAME.
Reproductions of papers are in `papers`, which uses this package.
"""
