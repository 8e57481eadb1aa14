"""The requirements of the installed package: all of it, or the memory box alone.

HBMCOMM_WITHOUT_TORCH=1 asks for the latter, when it is built: neither the process group nor what it
needs, PyTorch and MPI.
"""

import os

BOX = ["numpy", "prometheus-client", "rich", "typer"]
PROCESS_GROUP = ["torch==2.13.*", "mpich"]


def without_torch() -> bool:
    return os.environ.get("HBMCOMM_WITHOUT_TORCH", "0") not in ("", "0")


def dependencies() -> list[str]:
    return BOX if without_torch() else [*PROCESS_GROUP, *BOX]
