"""Comparisons of torch_hbmcomm with others; README.md lists the commands.

They use the framework of `torch_hbmcomm.bench`, and run from a checkout: python -m benchmarks.NAME.
What reproduces papers is in `papers`, which stands on this package.
"""
