"""Comparisons of torch_hbmcomm with other libraries; README.md lists the commands.

They use the framework `torch_hbmcomm.bench`, and run from a checkout: python -m benchmarks.NAME.
The package `papers` repeats experiments of papers, and uses this package.
"""
