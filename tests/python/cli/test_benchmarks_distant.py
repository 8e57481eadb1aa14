"""The benchmark of a memory box over a link with a delay: a small run."""

from __future__ import annotations

import pytest
from harness.network import skip_unless_namespaces_work
from typer.testing import CliRunner

from benchmarks import programs
from benchmarks.box.distant import app, run
from torch_hbmcomm.bench.result import Result
from torch_hbmcomm.sizes import MIB


def test_wrong_sizes_are_named() -> None:
    shown = CliRunner().invoke(app, ["--sizes", "1parsec"])
    assert shown.exit_code == 2 and "1parsec" in shown.output


@pytest.mark.full
def test_a_small_run_compares_with_a_plain_connection() -> None:
    skip_unless_namespaces_work()
    if cause := programs.why_unavailable("delay_link"):
        pytest.skip(cause)
    result = run([64, MIB], lanes=[1, 2], rounds=2, megabits=200, delay=5)
    text = result.to_json()
    assert Result.from_json(text).to_json() == text
    cells = [(one.contender, one.of["bytes"], one.of["operation"]) for one in result.measurements]
    assert cells == [
        (contender, size, operation)
        for contender in ("tcp", "hbm, 1", "hbm, 2")
        for size in (64, MIB)
        for operation in ("write", "read")
    ]
    for one in result.measurements:
        assert one.minimum > 10e3  # there and back
