"""PyTorch's own distributed suites: tests that pass over Gloo must also pass over hbm.

They run over the backend under test, and over hbm in the place of other backends
(HBMCOMM_INSTEAD_OF). torch_suite_gloo.txt and torch_suite_rpc_gloo.txt list the tests that pass
over Gloo. The first lines of these files say how to make them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import BACKEND, beyond_gloo
from harness.run_torch_suite import INSTEAD_OF, names, read_pass_list, run_suite, shortfall

HARNESS = Path(__file__).parents[1] / "harness"
GLOO_LIST = HARNESS / "torch_suite_gloo.txt"


@pytest.mark.full
@pytest.mark.torch_suite
@pytest.mark.ranks(4)
@pytest.mark.timeout(600)
def test_torch_suite(ranks: int, tmp_path: Path) -> None:
    log = tmp_path / "suite.log"
    gaps = shortfall(run_suite(BACKEND, ranks, [], log), read_pass_list(GLOO_LIST))
    assert not gaps, f"{gaps}\noutput in {log}"


@beyond_gloo
@pytest.mark.full
@pytest.mark.torch_suite
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("suite", "gloo_list"),
    [("distributed", GLOO_LIST), ("rpc", HARNESS / "torch_suite_rpc_gloo.txt")],
)
def test_torch_suite_instead_of_gloo(suite: str, gloo_list: Path, tmp_path: Path) -> None:
    log = tmp_path / "suite.log"
    found = run_suite(f"{INSTEAD_OF}gloo", 4, [], log, suite)
    wanted = read_pass_list(gloo_list) - names(found, "passed") | names(found, "failed")
    gaps = {name: found.get(name) for name in sorted(wanted)}
    assert not gaps, f"{gaps}\noutput in {log}"


@beyond_gloo
@pytest.mark.full
@pytest.mark.torch_suite
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["mpi", "ucc", "ccl"])
def test_torch_suite_instead_of_another(name: str, tmp_path: Path) -> None:
    """PyTorch's wheels have none of the three. So no list says what the suite passes over them."""
    log = tmp_path / "suite.log"
    found = run_suite(f"{INSTEAD_OF}{name}", 4, [], log)
    gaps = {test: found[test] for test in names(found, "failed")}
    assert not gaps, f"{gaps}\noutput in {log}"
    assert names(found, "passed") >= {"test_all_reduce_sum", "test_DistributedDataParallelCPU"}
