"""PyTorch's own distributed suite: what passes over Gloo passes over the backend under test.

torch_suite_gloo.txt lists what Gloo passes; its first lines say how to write it anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import BACKEND
from harness.run_torch_suite import read_pass_list, run_suite, shortfall

GLOO_LIST = Path(__file__).parents[1] / "harness" / "torch_suite_gloo.txt"


@pytest.mark.full
@pytest.mark.torch_suite
@pytest.mark.ranks(4)
@pytest.mark.timeout(600)
def test_torch_suite(ranks: int, tmp_path: Path) -> None:
    log = tmp_path / "suite.log"
    gaps = shortfall(run_suite(BACKEND, ranks, [], log), read_pass_list(GLOO_LIST))
    assert not gaps, f"{gaps}\noutput in {log}"
