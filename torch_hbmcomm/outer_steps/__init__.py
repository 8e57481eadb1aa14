"""Local steps with an outer optimizer: workers train alone, and meet once in many steps."""

from torch_hbmcomm.outer_steps.steps import OuterSteps

__all__ = ["OuterSteps"]
