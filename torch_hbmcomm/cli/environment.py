"""Reads the environment: which launcher started this process, and torch_hbmcomm's settings."""

import difflib
from collections.abc import Mapping

VARIABLES = {
    "HBMCOMM_ALLOCATOR": "where PyTorch puts large CPU tensors: default or segment (shared memory)",
    "HBMCOMM_BIND": "CPUs of each rank: none (the default), core or numa",
    "HBMCOMM_BOX": "address of the memory box that C programs use (smb.h)",
    "HBMCOMM_BOX_MEMORY": "bytes of the box that parameter_server=auto makes (half the machine's)",
    "HBMCOMM_BOX_SEAL": "0: boxes and their clients do not sign what tcp carries (1, they do)",
    "HBMCOMM_BOX_TRANSPORT": "how C programs reach it: auto (the default), shm, tcp or verbs",
    "HBMCOMM_HEARTBEAT_TIMEOUT": "seconds that another machine may not answer (the timeout)",
    "HBMCOMM_INSTEAD_OF": "gloo: groups that a program asks of Gloo are groups of hbm",
    "HBMCOMM_DEVICE_CHUNK_BYTES": "chunks of large operations on an accelerator's tensors (4M)",
    "HBMCOMM_ISA": "instruction set of the reduction kernels, instead of the best one",
    "HBMCOMM_LOG": "lowest level shown: error, warn (the default), info or debug",
    "HBMCOMM_MEMORY": "where memory comes from: preferred (the default), bind, interleave or ddr",
    "HBMCOMM_MPI_INCLUDE": "directory of MPICH's mpi.h, for native tests and benchmarks (found)",
    "HBMCOMM_MPI_LIB": "path of the MPI library to load",
    "HBMCOMM_NODE": "how ranks of one node reach one another: shm (the default) or mpi",
    "HBMCOMM_NODE_ID": "sets ranks with different values apart, as if on different nodes",
    "HBMCOMM_PARAMETER_SERVER": "memory boxes of every group: auto, or addresses of running ones",
    "HBMCOMM_REDUCE_THREADS": "threads that share a rank's large reductions and copies (1)",
    "HBMCOMM_SOCKET_DIR": "where processes that share memory find each other (/dev/shm)",
    "HBMCOMM_STAGING_BYTES": "bound of the staging memory, in bytes",
    "HBMCOMM_TEST_BACKEND": "backend that the tests run on (hbm)",
    "HBMCOMM_TEST_DEVICE": "device type that the tests of accelerators run on (late, their own)",
    "HBMCOMM_TEST_RANKS": "number of ranks of the tests (all sizes)",
    "HBMCOMM_TEST_SLURM_PORTS": "three ports of the tests' Slurm cluster (chosen)",
    "HBMCOMM_TOKEN": "the token of a memory box; before HBMCOMM_TOKEN_FILE",
    "HBMCOMM_TOKEN_FILE": "file with the token of a memory box (~/.config/hbmcomm/token)",
    "HBMCOMM_TORCH": "folders of unpacked wheels of PyTorch that a build has an extension for",
    "HBMCOMM_VERBS_LIB": "path of libhbm_verbs.so, the box's transport over RDMA",
    "HBMCOMM_WITHOUT_TORCH": "1: a build has the memory box alone",
}


def launcher(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the launcher's name and the variable that shows it. The innermost one counts: torchrun
    under srun is torchrun."""
    signs = {
        "torchrun": ("TORCHELASTIC_RUN_ID",),
        "srun": ("SLURM_STEP_ID",),
        "mpiexec": ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMIX_RANK"),
        "by hand": ("RANK",),
    }
    for name, variables in signs.items():
        for variable in variables:
            if variable in environ:
                return name, variable
    return "none", "no launcher's variables are set"


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that begin with HBMCOMM_, sorted; of a token only that it is set."""
    return {
        name: "(not shown)" if name == "HBMCOMM_TOKEN" else environ[name]
        for name in sorted(environ)
        if name.startswith("HBMCOMM_")
    }


def unknown(names: Mapping[str, str]) -> dict[str, str]:
    """Return, for each name that no part of torch_hbmcomm reads, what to do about it."""
    advice = {}
    for name in names:
        if name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            advice[name] = f"did you mean {close[0]}?" if close else "nothing reads it; unset it"
    return advice
