"""The memory box over RDMA: boxes and clients in a guest that has soft-RoCE."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from guest import boot, verbs

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]

MIB = 1 << 20
PASSED = re.compile(r"^\[  PASSED  \] (\d+) tests?\.$", re.MULTILINE)


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
    passed = PASSED.search(verbs.run([boot.PROGRAMS / program], tmp_path))
    assert passed is not None and int(passed[1]) > 0


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the speeds. Check only that they exist: an emulated machine's speed proves nothing."""
    sizes = [64 << 10, MIB]
    output = verbs.speeds(1, sizes, tmp_path)
    figures = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    with capsys.disabled():
        print(f"\n{output}")
    measured = {(row["operation"], row["bytes"]) for row in figures if "operation" in row}
    assert measured == {(name, size) for name in ("read", "write") for size in sizes}
    assert all(row["MiB/s"] > 0 for row in figures if "operation" in row)
