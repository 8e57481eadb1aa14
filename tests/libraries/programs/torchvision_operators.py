"""Lets torchvision of PyPI be imported with a PyTorch without CUDA.

This torchvision links the libraries of CUDA. Without these it leaves out its operators, and
`import torchvision` ends with "operator torchvision::nms does not exist". timm and lightly import
torchvision; transformers does if it is installed. The programs call none of its operators.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare() -> None:
    """Declare the operators that torchvision needs at import, if it cannot load its own."""
    found = find_spec("torchvision")
    if torch.version.cuda or not found or not found.origin:
        return
    if b"libtorch_cuda.so" in Path(found.origin).with_name("_C.so").read_bytes():
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


declare()
