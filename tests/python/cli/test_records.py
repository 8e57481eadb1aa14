"""The records of the benchmarks, their form, and the plots of them."""

from __future__ import annotations

import json
import math
import subprocess
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import plot
from papers.layer_drop.curves import panels as of_seeds
from papers.plot import PANELS
from torch_hbmcomm.bench import checkout
from torch_hbmcomm.bench.result import Measurement, Result, describe_machine, sampled
from torch_hbmcomm.bench.summary import Summary

ROOT = Path(__file__).resolve().parents[3]
OWN = [*sorted((ROOT / "benchmarks").glob("*.json")), *sorted((ROOT / "papers").glob("*.json"))]
RECORDS = [*OWN, *sorted((ROOT / "papers" / "records").glob("*.json"))]
SEEDS = sorted((ROOT / "papers").glob("*.jsonl"))
WITHOUT_PLOT = (
    *("automatic", "boxes", "ddp", "failures", "gpu", "heal"),
    *("profile_cases", "profile_cost"),
)


def test_statistics_of_samples() -> None:
    found = Summary.of([4.0, 1.0, 2.0, 3.0, 10.0])
    assert found == Summary(5, 1.0, 2.0, 3.0, 4.0, 10.0, 4.0)
    assert Summary.of([2.0]) == Summary(1, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)


def test_a_percentile_needs_samples_enough() -> None:
    assert Summary.of([1.0] * 199).p99 is None
    assert Summary.of([float(one) for one in range(200)]).p99 == pytest.approx(197.99)


def test_a_record_has_statistics_by_unit() -> None:
    of = {"section": "straggler"}
    assert sampled(of, "DDP", [1.0, 2.0000006], "ms", alone=[3.0]).to_record() == {
        "section": "straggler", "contender": "DDP", "calls_per_sample": 1,
        "n": 2, "minimum_ms": 1.0, "lower_quartile_ms": 1.25, "median_ms": 1.5,
        "upper_quartile_ms": 1.75, "maximum_ms": 2.000001, "mean_ms": 1.5,
        "alone_n": 1, "alone_minimum_ms": 3.0, "alone_lower_quartile_ms": 3.0,
        "alone_median_ms": 3.0, "alone_upper_quartile_ms": 3.0, "alone_maximum_ms": 3.0,
        "alone_mean_ms": 3.0,
    }  # fmt: skip


def test_a_measurement_without_samples_has_no_median() -> None:
    with pytest.raises(ValueError, match=r"hbm has no samples of {'bytes': 8}"):
        _ = Measurement({"bytes": 8}, "hbm", values={"mib_s": 1.0}).median


def test_written_records_are_read() -> None:
    of = {"section": "shm", "operation": "read", "bytes": 8, "clients": 1}
    found = [
        sampled(of, "hbm", [1.0, 3.0], alone=[2.0], values={"smallest_share": 0.5}),
        sampled(of, "memcpy", [1.0] * 200, "ms", calls_per_sample=2),
        Measurement(of, "link", curves={"steps": [1.0, 2.0]}),
    ]
    result = Result(
        "box", {"cpu": "", "cores": 1}, {"rounds": 2}, references=[], notes=[], measurements=found
    )
    assert Result.from_json(result.to_json()) == result


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()


def test_a_record_has_the_state_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    state = checkout.state()  # read once: another process may change the checkout
    monkeypatch.setattr(checkout, "state", lambda: state)
    assert state.items() <= describe_machine().items()


def test_a_checkout_has_a_commit_and_modified_files(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("one.py", "other.py"):
        (folder / name).touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (folder / "untracked.py").touch()
    assert checkout.state(folder / "one.py") == {"commit": commit, "modified": []}
    (folder / "other.py").write_text("changed")
    assert checkout.state(folder / "one.py") == {"commit": commit, "modified": ["package/other.py"]}


def test_a_file_that_git_does_not_track_has_no_commit(tmp_path: Path) -> None:
    installed = tmp_path / "installed.py"
    installed.touch()
    git(tmp_path, "init", "--quiet")
    assert checkout.state(installed) == {"commit": None, "modified": None}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_records_have_the_current_format(record: Path) -> None:
    result = Result.from_json(record.read_text())
    assert result.measurements
    assert result.to_json() == record.read_text()


@pytest.mark.parametrize("record", OWN, ids=lambda record: record.stem)
def test_records_are_named_after_their_benchmark(record: Path) -> None:
    result = Result.from_json(record.read_text())
    assert result.benchmark in record.stem.replace("-", "_").replace("layerdrop", "layer_drop") or (
        result.benchmark == "collectives"
    )


@pytest.mark.parametrize("record", SEEDS, ids=lambda record: record.stem)
def test_records_of_seeds_have_statistics(record: Path) -> None:
    for row in map(json.loads, record.read_text().splitlines()):
        for name in ("qualities", "differences"):
            assert Summary(**row[name]).n >= 1
        assert Summary(**row["differences"]).mean == pytest.approx(row["difference"])


@pytest.mark.parametrize("record", [*OWN, *SEEDS], ids=lambda record: record.stem)
def test_records_have_something_to_plot(record: Path) -> None:
    """Check the numbers to plot. The tests of the benchmarks draw plots with matplotlib."""
    text = record.read_text()
    if record in SEEDS:
        panels, columns = of_seeds([json.loads(line) for line in text.splitlines()])
    elif (result := Result.from_json(text)).benchmark in WITHOUT_PLOT:
        return
    else:
        panels, columns = {**plot.PANELS, **PANELS}[result.benchmark](result)
    assert columns
    bars = (ys for panel in panels for ys in panel.bars.values())
    lines = (ys for panel in panels for _, ys, _ in panel.lines.values())
    numbers = list(chain(*bars, *lines))
    assert numbers and all(map(math.isfinite, numbers))
