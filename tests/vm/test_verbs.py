"""The memory box over RDMA: boxes and clients in a guest that has soft-RoCE."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.guest import boot

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]

LINK = Path(__file__).with_name("verbs_link.sh")
SPEED = Path(__file__).with_name("verbs_speed.sh")
HOST = "10.9.0.1"
MIB = 1 << 20
PASSED = re.compile(r"^\[  PASSED  \] (\d+) tests?\.$", re.MULTILINE)


def run(folder: Path, *command: str | Path) -> str:
    """Return the output of a command in a guest that has an RDMA device."""
    return boot.run(
        "hbm",
        ["sh", LINK, *command],
        folder,
        environment={"HBM_BOX_TRANSPORTS": "verbs", "HBM_BOX_HOST": HOST},
        modules=["rxe"],
    ).stdout


@pytest.mark.parametrize(
    "program",
    [
        "smb_conformance_test",
        "smb_conformance_sums_test",
        "vm_verbs_keys_test",
        "vm_verbs_deaths_test",
    ],
)
def test_native(program: str, tmp_path: Path) -> None:
    passed = PASSED.search(run(tmp_path, boot.PROGRAMS / program))
    assert passed is not None and int(passed[1]) > 0


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the figures; how fast an emulated machine is proves nothing, so none is required."""
    sizes = [64 << 10, 256 << 10, MIB]
    output = run(tmp_path, "sh", SPEED, boot.PROGRAMS / "vm_verbs_speed", "8", *map(str, sizes))
    figures = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    with capsys.disabled():
        print(f"\n{output}")
    measured = {(row["operation"], row["bytes"]) for row in figures if "operation" in row}
    assert measured == {(name, size) for name in ("read", "write") for size in sizes}
    assert all(row["MiB/s"] > 0 for row in figures if "operation" in row)
