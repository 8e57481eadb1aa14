"""The test accelerator itself: each kind of ordering mistake shows on it.

Otherwise the tests of this folder could not find such a mistake in hbm.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1]
BEGIN = f"""
import ctypes, sys
sys.path.insert(0, {str(FOLDER)!r})
import torch
from harness import accelerator
delayed = accelerator.load()
delayed.set_longest_delay(0)
side = torch.Stream(device="late")
tensor = torch.zeros(1000, device="late")
host = torch.empty(1000, pin_memory=True)
delayed.synchronize()
delayed.hold()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=100
    )


MISTAKES = {
    "the host reads device memory": (
        "print(ctypes.c_float.from_address(tensor.data_ptr()).value)",
        -signal.SIGSEGV,
    ),
    "a copy that does not wait for the producer": (
        """
tensor.fill_(7.0)
with side:
    host.copy_(tensor, non_blocking=True)
side.synchronize()
assert host[0].item() == 0.0
delayed.release()
""",
        0,
    ),
    "a result read before its event": (
        """
with side:
    host.zero_()
delayed.release()
delayed.synchronize()
with side:
    delayed.hold()
    host.copy_(tensor.fill_(7.0), non_blocking=True)
assert host[0].item() == 0.0
with side:
    delayed.release()
side.synchronize()
assert host[0].item() == 7.0
""",
        0,
    ),
    "memory that another stream still uses, not recorded": (
        """
delayed.release()
tensor.fill_(7.0)
delayed.synchronize()
with side:
    delayed.hold()
    host.copy_(tensor, non_blocking=True)
del tensor
delayed.synchronize()
with side:
    delayed.release()
side.synchronize()
assert host[0].item() != 7.0
""",
        0,
    ),
    "the same, recorded": (
        """
delayed.release()
tensor.fill_(7.0)
delayed.synchronize()
with side:
    delayed.hold()
    host.copy_(tensor, non_blocking=True)
tensor.record_stream(side)
del tensor
delayed.synchronize()
with side:
    delayed.release()
side.synchronize()
assert host[0].item() == 7.0
""",
        0,
    ),
    "pinned memory that is written to while a copy reads it": (
        """
delayed.release()
with side:
    delayed.hold()
    tensor.copy_(host, non_blocking=True)
host.copy_(tensor, non_blocking=True)
assert delayed.pinned_counts()["reused_in_copy"] == 1
with side:
    delayed.release()
""",
        0,
    ),
    "memory that is no longer pinned while a copy uses it": (
        """
calls = ctypes.CDLL(delayed.__file__)
block = torch.empty(1000)
address = ctypes.c_void_p(block.data_ptr())
assert calls.lateHostRegister(address, ctypes.c_size_t(4000), 1) == 0
assert block.is_pinned() and delayed.pinned_counts()["registered"] == 1
block.copy_(tensor, non_blocking=True)
assert calls.lateHostUnregister(address) == 0
assert delayed.pinned_counts()["freed_in_copy"] == 1
delayed.release()
""",
        0,
    ),
    "pinned memory that is freed while a copy uses it": (
        """
host.copy_(tensor, non_blocking=True)
del host
assert delayed.pinned_counts()["freed_in_copy"] == 1
delayed.release()
""",
        0,
    ),
}


@pytest.mark.parametrize(("script", "code"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_show(script: str, code: int) -> None:
    done = run(script)
    assert done.returncode == code, done.stderr
