"""The memory box's C interface, csrc/smb.h, by ctypes: this process is one client of one box."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

import torch_hbmcomm
from harness.box_process import ROOT

IPC_CREAT, IPC_EXCL, SHM_RDONLY = 0o1000, 0o2000, 0o10000  # of Linux, for shmget(2) and shmat(2)

HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "csrc" / "smb.h").read_text(), flags=re.DOTALL)
CONSTANTS = {name: int(value) for name, value in re.findall(r"#define (SMB_\w+) (\d+)u", HEADER)}

_POINTER, _SIZE, _STATUS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_KEY = ctypes.POINTER(ctypes.c_uint64)
_TYPES = {
    "smb_init": (_STATUS, []),
    "smb_terminate": (None, []),
    "smb_exists": (_STATUS, [ctypes.c_uint64]),
    "smb_delete": (_STATUS, [_POINTER]),
    "smb_error": (ctypes.c_char_p, []),
    "shm_alloc": (_POINTER, [_KEY, ctypes.c_uint64, ctypes.c_int]),
    "shm_free": (None, [_POINTER]),
    "shm_get_key": (ctypes.c_ulong, [_POINTER]),
    "shm_rsync": (_STATUS, [_POINTER, _SIZE]),
    "shm_wsync": (_STATUS, [_POINTER, _SIZE]),
    "shm_accum": (_STATUS, [_POINTER, _POINTER, _SIZE, ctypes.c_uint]),
}


def library() -> ctypes.CDLL:
    """Return libhbmsmb.so, whose functions have the types that the header declares."""
    loaded = ctypes.CDLL(str(Path(torch_hbmcomm.__path__[-1]) / "libhbmsmb.so"), use_errno=True)
    for name, (result, arguments) in _TYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def alloc(loaded: ctypes.CDLL, key: int, size: int, flags: int) -> tuple[int | None, int]:
    """Call shm_alloc. Returns its result, and the key."""
    wanted = ctypes.c_uint64(key)
    found: int | None = loaded.shm_alloc(ctypes.byref(wanted), size, flags)
    return found, wanted.value


def tensor(copy: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return the `size` bytes at an address as a tensor."""
    return torch.frombuffer((ctypes.c_char * size).from_address(copy), dtype=dtype)
