"""The module torch_ucc, where it is not installed.

stand_in_modules.py runs this file under that name. Programs import torch_ucc only to make the
backend "ucc" known, and with HBMCOMM_INSTEAD_OF=ucc hbm has done that.
"""
