"""Clears the environment variables that tests must not depend on.

It does not import PyTorch, which reads some of them at import.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

_SETTINGS = ("HBMCOMM_", "MEMKIND_", "DDP_", "GLOO_", "OMP_", "MPICH_", "MPIR_", "UCX_", "FI_")
_TORCH = ("TORCH_DISTRIBUTED_", "TORCH_FR_", "TORCH_LOGS", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_LAUNCHERS = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_", "SLURM_", "OMPI_")
_MPIEXEC = ("PMI", "MPI_LOCAL")
_TERMINAL = ("COLUMNS", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
_KEPT = ("HBMCOMM_TEST_", "HBMCOMM_MPI_")  # options of the tests, and the MPI to test with

_LONGEST = 64  # bytes of TMPDIR: paths of multiprocessing's sockets in it may have at most 107


def settle() -> None:
    removed = (*_SETTINGS, *_TORCH, *_LAUNCHERS, *_MPIEXEC, *_TERMINAL)
    for name in list(os.environ):
        if name.startswith(removed) and not name.startswith(_KEPT):
            del os.environ[name]
    # A shell's background job ignores SIGINT. The processes that tests start would inherit this.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TERM"] = "xterm"  # a dumb terminal has 80 columns, even if COLUMNS differs
    # PyTorch's TCPStore looks up its peer's name at each connect. This takes 10 s by default if no
    # name server answers.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
    # Traces of operations that time out must not go to the user's cache.
    traces = tempfile.mkdtemp(prefix="hbmcomm-traces-")
    atexit.register(shutil.rmtree, traces, ignore_errors=True)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{traces}/rank_"
