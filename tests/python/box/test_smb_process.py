"""The memory box and the life of a process: imports, exit, fork, C."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.box_process import ROOT, TOKEN

from torch_hbmcomm import smb


def test_needs_no_torch_and_leaves_nothing(nothing_left: None) -> None:
    script = """
import sys
from torch_hbmcomm import smb
server = smb.Server(memory="1MiB", token="t")
box = smb.connect(server.url, "t")
segment = box.alloc(64)
segment.fetch_add(0, 1)
future = segment.read_async()
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""  # the process ends with all of these open
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=30)


def test_a_forked_child_closes_its_own(server: smb.Server) -> None:
    """At exit a child closes its own connection, so the box does not wait for the lease's end.

    The child leaves its parent's connection open.
    """
    script = """
import ctypes, os, sys, time
from torch_hbmcomm import smb
url, token = sys.argv[1:]
parents = smb.connect(url, token)
child = os.fork()
box = smb.connect(url, token) if child == 0 else parents
ctypes.pythonapi.Py_IncRef(ctypes.py_object(box))  # so that nothing else closes it
segment = box.alloc(64, f"forked {child == 0}", temporary=True)
if child == 0:
    sys.exit()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
box.alloc(64, "forked False", mode="attach")
end = time.monotonic() + 20  # the lease has 30 s
while box.exists("forked True"):
    assert time.monotonic() < end, "the child left its segment behind"
    time.sleep(0.01)
"""
    command = [sys.executable, "-c", script, server.url, TOKEN]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environ, check=True, timeout=90)


def test_a_c_process_that_frees_second_lets_go() -> None:
    """shm_free() by the segment's creator detaches, although another client has deleted the key."""
    script = """
import ctypes, sys
from pathlib import Path
import torch_hbmcomm
from torch_hbmcomm import smb
library = ctypes.CDLL(str(Path(torch_hbmcomm.__path__[0]) / "libhbmsmb.so"))
library.shm_alloc.restype = ctypes.c_void_p
library.shm_alloc.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64, ctypes.c_int]
library.shm_free.argtypes = [ctypes.c_void_p]
assert library.smb_init() == 0
key = ctypes.c_uint64(0)
memory = library.shm_alloc(ctypes.byref(key), 64, 0)
assert memory
with smb.connect(sys.argv[1]) as box:
    box.alloc(64, key.value, mode="attach").delete()
    attachments = lambda: sum(row["attachments"] for row in box.stats()["client_table"])
    assert attachments() == 1
    library.shm_free(memory)
    assert attachments() == 0
library.smb_terminate()
"""
    with smb.Server(memory="1MiB", token=TOKEN) as server:
        command = [sys.executable, "-c", script, server.url]
        environ = {"PYTHONPATH": str(ROOT), "HBMCOMM_TOKEN": TOKEN, "HBMCOMM_BOX": server.url}
        subprocess.run(command, env=os.environ | environ, check=True, timeout=30)
