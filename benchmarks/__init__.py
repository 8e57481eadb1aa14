"""What torch_hbmcomm is compared with, and what reproduces papers; README.md lists the commands.

On the framework of `torch_hbmcomm.bench`, and run from a checkout: python -m benchmarks.NAME.
"""
