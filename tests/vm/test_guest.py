"""The virtual machine itself: its output, and the detection of failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from guest import boot

pytestmark = [pytest.mark.vm, pytest.mark.full, pytest.mark.timeout(boot.LIMIT + 60)]


def test_outcome_and_further_modules(tmp_path: Path) -> None:
    command = ["sh", "-c", "pwd; echo $COLOUR >&2; test -d /sys/module/rdma_rxe && exit 7"]
    result = boot.run(
        "hbm",
        command,
        tmp_path,
        environment={"COLOUR": "dark red"},
        modules=["rxe"],
        check=False,
    )
    assert result.status == 7
    assert result.stdout == f"{boot.REPOSITORY}\n"
    assert result.stderr == "dark red\n"
    assert "Linux version" in result.kernel_log


def test_failure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(boot.GuestError, match=r"exit status 127(.|\n)*no-such-program"):
        boot.run("hbm", ["no-such-program"], tmp_path)


def test_no_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(boot.GuestError, match=r"sleep 100: no end within 1 s"):
        boot.run("hbm", ["sleep", "100"], tmp_path, timeout=1)
