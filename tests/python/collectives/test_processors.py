"""The threads of a large reduction, and HWLOC_COMPONENTS, which keeps hwloc from moving threads."""

import re

import pytest
from harness.jobs import assert_done, run, run_code, torchrun

from torch_hbmcomm.machine import cores


def test_no_more_threads_reduce_than_there_are_processors_for() -> None:
    finished = run(torchrun(2), HBMCOMM_REDUCE_THREADS="64", HBMCOMM_LOG="debug")
    assert_done(finished, 2)
    found = re.findall(r"threads of a large reduction: (\d+)", finished.output)
    assert found and max(map(int, found)) <= max(1, cores() // 2)


def test_hwloc_leaves_threads_on_their_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, torch_hbmcomm.backend; print(os.environ['HWLOC_COMPONENTS'])"
    monkeypatch.delenv("HWLOC_COMPONENTS", raising=False)
    assert run_code(code).output == "-x86\n"
    assert run_code(code, HWLOC_COMPONENTS="linux").output == "linux\n"
