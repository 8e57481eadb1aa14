"""Comparisons of torch_hbmcomm with others, and reproductions of papers; README.md lists the
commands.

They use the framework of `torch_hbmcomm.bench`, and run from a checkout: python -m benchmarks.NAME.
"""
