"""The requirements of the installed package, which is the whole package or the memory box alone.

HBMCOMM_WITHOUT_TORCH=1 at build time selects the memory box alone: without the process group,
PyTorch and MPI.
"""

import os

import torch_releases

BOX = ["numpy", "prometheus-client", "rich", "typer"]


def without_torch() -> bool:
    return os.environ.get("HBMCOMM_WITHOUT_TORCH", "0") not in ("", "0")


def dependencies(minors: list[int]) -> list[str]:
    """Return the requirements of a build for the minor releases `minors` of PyTorch 2.

    Empty `minors` mean a build of the memory box alone.
    """
    return [torch_releases.requirement(minors), "mpich", *BOX] if minors else BOX
