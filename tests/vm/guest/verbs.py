"""Commands in a guest that has an RDMA device: soft-RoCE over a link of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from guest import boot

_LINK = Path(__file__).with_name("verbs_link.sh")
_SPEED = Path(__file__).with_name("verbs_speed.sh")
HOST = "10.9.0.1"


def run(command: Sequence[str | Path], directory: Path) -> str:
    """Return the output of a command, with HBM_BOX_TRANSPORTS and HBM_BOX_HOST set for verbs.

    directory: must be empty, and receives the files of the guest. Raises GuestError.
    """
    environment = {"HBM_BOX_TRANSPORTS": "verbs", "HBM_BOX_HOST": HOST}
    return boot.run(
        "hbm", ["sh", _LINK, *command], directory, environment=environment, modules=["rxe"]
    ).stdout


def speeds(mebibytes: int, sizes: Sequence[int], directory: Path) -> str:
    """Return the lines of verbs_speed.sh, which moves `mebibytes` in transfers of each size."""
    program = boot.PROGRAMS / "guest_verbs_speed"
    return run(["sh", _SPEED, program, str(mebibytes), *map(str, sizes)], directory)
