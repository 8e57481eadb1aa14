"""The benchmark of collectives between nodes: its bounds, its tables, and a quick run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness.network import skip_unless_namespaces_work
from typer.testing import CliRunner

from benchmarks import programs
from benchmarks.collectives.layouts import BACKENDS, COLLECTIVES, WITHOUT, Layout
from benchmarks.collectives.nodes import LINK, app, measured, table
from benchmarks.namespaces import NoNamespaces, switched_nodes
from papers.report.nodes import NODES
from torch_hbmcomm.bench.result import Result, sampled

MIB = 1 << 20


def test_nodes_are_compared_with_the_links_bound() -> None:
    rows = [
        {
            "collective": "broadcast",
            "mib": 2,
            "seconds": {"hbm": [0.2, 0.3, 0.9], WITHOUT: [0.9], "gloo": [0.6, 0.6, 0.6]},
            "processor": {"hbm": [0.1, 0.2, 0.3], WITHOUT: [0.7], "gloo": [0.5, 0.4, 0.4]},
            "crossed": {"hbm": 3 * MIB, WITHOUT: 9 * MIB, "gloo": 8 * MIB},
        }
    ]
    measurements = list(measured(Layout("2x2"), "1gbit", goodput=10 * MIB, rows=rows))
    result = Result("nodes", {}, {}, measurements=measurements)
    times = ["200.0", "300.0", "900.0", "600.0"]
    of = ["2x2, 1gbit", "broadcast", "2"]
    ratios = ["1.50", "3.00", "2.00", "3.00", "1.50", "4.00"]
    shown = table(result)
    assert list(shown.rows[0]) == [*of, *times, *ratios, "0.200", "0.400"]
    assert NODES.table({"nodes-2x2": result, "nodes-2x4": result}).rows == [*shown.rows] * 2
    (panel,) = NODES.panels({"nodes-2x2": result})
    assert {name: bars[0] for name, bars in panel.bars.items()} == pytest.approx(
        {"hbm": 1.5, WITHOUT: 4.5, "gloo": 3.0}
    )
    heading, rule, line = shown.markdown()
    assert heading.count("|") == rule.count("|") == line.count("|")
    assert line.startswith("| 2x2, 1gbit | broadcast | 2 | 200.0 | 300.0 | 900.0 |")


def all_reduces(**layouts: tuple[float, ...]) -> dict[str, Result]:
    """Return results of all_reduce, by run. A layout has the times of hbm, and of hbm without
    leaders if they were measured; the bound and Gloo take 1."""
    found = {}
    for layout, times in layouts.items():
        text = layout.removeprefix("l")
        of = {"layout": text, "rate": "1gbit", "collective": "all_reduce", "mib": 4}
        contenders = {**dict(zip(("hbm", WITHOUT), times, strict=False)), LINK: 1.0, "gloo": 1.0}
        measurements = [sampled(of, name, [time]) for name, time in contenders.items()]
        found[f"nodes-{text}"] = Result("nodes", {}, {}, measurements=measurements)
    return found


def test_leaders_are_compared_with_hbm_without_leaders() -> None:
    """Nodes of one rank do not count: the rank is the leader."""
    (claim,) = NODES.claims
    assert callable(claim.outcome)
    here = claim.outcome(all_reduces(l2x2=(1.0, 1.5), l4x2=(1.0, 2.5), l3x1=(1.0, 9.0))).here
    assert "Without leaders, hbm takes 2.00 times as long (1.50 to 2.50 over 2 cells)." in here


def test_a_record_without_the_run_without_leaders_says_so() -> None:
    (claim,) = NODES.claims
    assert callable(claim.outcome)
    for layouts in ({"l2x2": (1.0,)}, {"l2x2": (1.0,), "l3x1": (1.0, 9.0)}):
        assert "hbm without leaders: not measured." in claim.outcome(all_reduces(**layouts)).here


def test_the_least_bytes_of_layouts() -> None:
    even, wide, uneven = Layout("2x4"), Layout("4x2"), Layout("3+1")
    assert (wide.nodes, wide.ranks, uneven.ranks_of) == (4, 8, [3, 1])
    least = {
        name: [one.least_bytes(name, 8) / MIB for one in (even, wide, uneven)]
        for name in COLLECTIVES
    }
    assert least == {
        "all_reduce": [8, 12, 8],
        "reduce_scatter": [4, 6, 6],
        "all_gather": [4, 6, 6],
        "broadcast": [8, 8, 8],
        "all_to_all": [16, 12, 6],
        "fsdp_step": [12, 18, 18],
    }
    assert even.least_crossed("all_reduce", 8) == 8 * MIB
    assert uneven.least_crossed("fsdp_step", 8) == 12 * MIB


@pytest.mark.parametrize("text", ["", "2", "1x4", "0x2", "3+", "2x2x2", "0+1"])
def test_other_texts_are_no_layouts(text: str) -> None:
    with pytest.raises(ValueError, match=r"no layout|one node"):
        Layout(text)


@pytest.mark.full
def test_a_link_with_a_delay_adds_a_delay_for_each_phase(tmp_path: Path) -> None:
    skip_unless_namespaces_work()
    if cause := programs.why_unavailable("delay_link"):
        pytest.skip(cause)
    record = tmp_path / "nodes.json"
    command = [sys.executable, "-m", "benchmarks.collectives.nodes", "--layout=2x1"]
    command += ["--rate=200mbit", "--delay=20", "--mib=0.0625", "--rounds=1", f"--json={record}"]
    command += ["--collective=all_reduce", "--collective=broadcast"]
    subprocess.run(command, check=True, timeout=800)
    found = Result.from_json(record.read_text()).measurements
    bounds = {one.of["collective"]: one.median for one in found if one.contender == "link"}
    assert bounds["all_reduce"] > 40e3 and bounds["broadcast"] > 20e3
    assert bounds["all_reduce"] == pytest.approx(bounds["broadcast"] + 20e3)
    assert {one.of["rate"] for one in found} == {"200mbit, 20 ms"}
    (reduced,) = [
        one for one in found if one.contender == "hbm" and one.of["collective"] == "all_reduce"
    ]
    assert reduced.median > 20e3  # every packet takes as long


def test_a_link_with_a_delay_joins_two_nodes() -> None:
    shown = CliRunner().invoke(app, ["--layout", "3x1", "--delay", "10"])
    assert shown.exit_code == 2 and "joins two nodes" in shown.output


@pytest.mark.full
def test_a_quick_run_writes_its_record_and_its_table(tmp_path: Path) -> None:
    try:
        with switched_nodes(2, "1gbit"):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))
    record, page = tmp_path / "nodes.json", tmp_path / "nodes.md"
    command = [sys.executable, "-m", "benchmarks.collectives.nodes", "--quick"]
    subprocess.run([*command, f"--json={record}", f"--markdown={page}"], check=True, timeout=800)
    found = json.loads(record.read_text())["measurements"]
    cells = {(one["layout"], one["collective"], one["contender"]) for one in found}
    assert len(cells) == len(found) == 2 * len(COLLECTIVES) * (1 + len(BACKENDS))
    for one in found:
        if one["contender"] == "hbm":
            assert one["values"]["crossed_bytes"] > 0
            assert one["values"]["processor_s"] > 0
    assert len(page.read_text().splitlines()) == 2 + 2 * len(COLLECTIVES)
