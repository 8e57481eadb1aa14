"""The test accelerator (tests/native/accelerator): a device "late" under PrivateUse1.

The host cannot touch its memory. Its streams run with delays, on their own threads.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from torch_hbmcomm import _autoload

NAME = "late"
# The device of the tests that run on any accelerator. HBMCOMM_TEST_DEVICE can name a real device.
DEVICE = os.environ.get("HBMCOMM_TEST_DEVICE") or NAME
_BUILD = Path(__file__).resolve().parents[3] / "build"


@cache
def load() -> Any:
    """Make "late" PyTorch's accelerator in this process, and register hbm for this device.

    Returns the device's native module. REQUIRES: this process does not fork afterwards, because a
    fork has no copies of the streams' threads.
    """
    module = _module()
    backend_registration.rename_privateuse1_backend(NAME)
    _add_streams(module)
    torch._register_device_module(NAME, module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    _autoload.register()
    return module


def _add_streams(module: Any) -> None:
    """Give the device's module the functions and classes of torch.cuda that FSDP2 uses."""

    def stream(stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    module.Stream = partial(torch.Stream, device=NAME)
    module.Event = partial(torch.Event, device=NAME)
    module.current_stream = torch.accelerator.current_stream
    module.stream = stream


def _module() -> Any:
    major, minor = torch.__version__.split(".")[:2]
    tag = sys.implementation.cache_tag
    name = f"accelerator/torch_{major}_{minor}/late_accelerator{EXTENSION_SUFFIXES[0]}"
    # The Makefile's directory sorts first: scripts/test_torch.sh adds "-elsewhere" to the name.
    built = sorted(_BUILD.glob(f"{tag}*/{name}"))
    if not built:
        raise FileNotFoundError(
            f"there is no {name} in a folder of {_BUILD}; run `make accelerator`"
        )
    spec = importlib.util.spec_from_file_location("late_accelerator", built[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
