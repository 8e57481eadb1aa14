"""The modules oneccl_bindings_for_pytorch and torch_ccl, where neither is installed.

stand_in_modules.py runs this file under either name, for programs that import torch-ccl. As with
torch-ccl, the import adds ProcessGroupCCL to torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torch_hbmcomm import instead_of, stand_in_modules

__all__ = ["ProcessGroupCCL", "is_available"]
__version__ = stand_in_modules.CCL_VERSION

ProcessGroupCCL = instead_of.process_group_ccl
dist.ProcessGroupCCL = ProcessGroupCCL  # type: ignore[attr-defined]


def is_available(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True: hbm takes tensors of any layout and device."""
    return True
