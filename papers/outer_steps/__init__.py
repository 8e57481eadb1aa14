"""Outer steps (DiLoCo) compared with DDP, the low-rank hook and torchft's DiLoCo."""
