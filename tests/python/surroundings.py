"""Clears the surroundings that tests must not depend on: the environment of whoever starts them.

Knows nothing of PyTorch, whose import reads some of it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

_SETTINGS = ("HBMCOMM_", "MEMKIND_", "DDP_", "GLOO_", "OMP_", "MPICH_", "MPIR_", "UCX_", "FI_")
_TORCH = ("TORCH_DISTRIBUTED_", "TORCH_FR_", "TORCH_LOGS", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_LAUNCHERS = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "PMI", "TORCHELASTIC_", "SLURM_", "OMPI_")
_TERMINAL = ("COLUMNS", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
_KEPT = ("HBMCOMM_TEST_", "HBMCOMM_MPI_")  # ours, and which MPI to test with

_LONGEST = 64  # bytes of TMPDIR, where multiprocessing makes Unix sockets, whose paths take 107


def settle() -> None:
    removed = (*_SETTINGS, *_TORCH, *_LAUNCHERS, *_TERMINAL)
    for name in list(os.environ):
        if name.startswith(removed) and not name.startswith(_KEPT):
            del os.environ[name]
    # A background job of a shell ignores Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TERM"] = "xterm"  # a dumb one has 80 columns, whatever COLUMNS says
    # PyTorch's TCPStore asks for its peers' names at each connect: by default, 10 s where no name
    # server answers.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
    # The traces of operations that time out: not into the cache of whoever runs the tests.
    traces = tempfile.mkdtemp(prefix="hbmcomm-traces-")
    atexit.register(shutil.rmtree, traces, ignore_errors=True)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{traces}/rank_"
