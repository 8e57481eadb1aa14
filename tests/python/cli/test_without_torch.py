"""The features that need no PyTorch (docs/installing.md). In their processes its import fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.jobs import Finished, run_code

from torch_hbmcomm.profiling.ranks import VERSION

pytestmark = beyond_gloo

BUFFER = """
from torch_hbmcomm import smb
with smb.Server(memory="1MiB", token="t") as server, smb.connect(server.url, "t") as box:
    segment = box.alloc(64)
    segment.write(source=b"bytes")
    found = bytearray(5)
    segment.read(into=found)
    assert found == b"bytes"
"""
ARRAY = """
import numpy
from torch_hbmcomm import smb
with smb.Server(memory="1MiB", token="t") as server, smb.connect(server.url, "t") as box:
    segment = box.alloc(64)
    segment.write(source=numpy.arange(8.0))
    found = numpy.empty(8)
    segment.read(into=found)
    assert (found == numpy.arange(8.0)).all()
"""
METRICS = """
import urllib.request
from torch_hbmcomm import smb
from torch_hbmcomm.cli.metrics import Address, Metrics
with smb.Server(memory="1MiB", token="t") as server:
    with Metrics(server, Address.parse("127.0.0.1:0")) as metrics:
        text = urllib.request.urlopen(metrics.url).read().decode()
assert "capacity_bytes 1.048576e+06" in text, text
"""


def without_torch(code: str) -> Finished:
    return run_code(f"import sys; sys.modules['torch'] = None\n{code}")


def hbmcomm(*arguments: str) -> Finished:
    return without_torch(f"from torch_hbmcomm.cli import app\napp({list(arguments)!r})")


@pytest.mark.parametrize("code", [BUFFER, ARRAY, METRICS], ids=["buffer", "array", "metrics"])
def test_a_memory_box(code: str) -> None:
    finished = without_torch(code)
    assert finished.code == 0, finished.output


def test_the_speed_of_a_box() -> None:
    finished = hbmcomm("bench", "box", "--sections", "shm", "--largest", "64KiB", "--rounds", "1")
    assert finished.code == 0, finished.output


def test_the_page_of_a_profile(tmp_path: Path) -> None:
    group = {"key": "k", "name": 'group "0"', "ranks": [0], "nodes": [0], "rank": 0}
    profile = {
        **{"version": VERSION, "rank": 0, "host": "host", "process": 1, "clock": "one"},
        **{"begin": 0, "end": 1_000_000, "lost": 0, "written": 1.0, "first_group": "k"},
        **{"groups": [group], "operations": []},
    }
    (tmp_path / "rank-0.json").write_text(json.dumps(profile))
    finished = hbmcomm("profile", str(tmp_path))
    assert finished.code == 0, finished.output


def test_info_names_the_missing_pytorch() -> None:
    finished = hbmcomm("info")
    assert finished.code == 1, finished.output
    assert "torch" in finished.output
