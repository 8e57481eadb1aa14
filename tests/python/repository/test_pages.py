"""The programs in the pages: they are Python, and whole ones train."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT = 240  # seconds, for one training


def programs(page: Path) -> list[str]:
    return PROGRAM.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_programs_are_python(page: Path) -> None:
    for program in programs(page):
        ast.parse(program, page.name)


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "output"), [("README.md", ""), ("docs/quickstart.md", "2 ranks, loss 0.0000\n")]
)
def test_the_first_program_trains_on_two_ranks(tmp_path: Path, page: str, output: str) -> None:
    train = tmp_path / "train.py"
    train.write_text(programs(ROOT / page)[0])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", train],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
