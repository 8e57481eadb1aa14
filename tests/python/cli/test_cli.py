"""The command line: its output, its exit status, and the JSON that scripts read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.command_line import ROOT, invoke, run
from rich.console import Console, RenderableType

import torch_hbmcomm
from torch_hbmcomm import variables
from torch_hbmcomm.bench import collectives, ddp
from torch_hbmcomm.bench.collectives import COLLECTIVES
from torch_hbmcomm.bench.ranks import launch
from torch_hbmcomm.bench.report import format_time
from torch_hbmcomm.bench.result import Measurement, sampled
from torch_hbmcomm.bench.result import Result as Found
from torch_hbmcomm.bench.summary import Summary
from torch_hbmcomm.cli import demo, environment
from torch_hbmcomm.sizes import format_bytes, parse_bytes


def test_the_demo_trains_over_hbm_and_over_gloo() -> None:
    demonstrated = run("demo")
    assert demonstrated.returncode == 0, demonstrated.stdout + demonstrated.stderr
    assert re.search(r"OK: .* losses over hbm and gloo agree to \d", demonstrated.stdout)


def test_the_demo_needs_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    refused = invoke("demo")
    assert refused.exit_code == 1
    assert "PyTorch is not installed" in refused.output


def test_the_demo_needs_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "releases", lambda package: [])
    refused = invoke("demo")
    assert refused.exit_code == 1
    assert "hbmcomm demo: torch_hbmcomm has no native module for PyTorch " in refused.output


def test_gloo_stays_gloo_in_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def start(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        seen.append(env)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setenv("HBMCOMM_INSTEAD_OF", "all")
    assert invoke("demo").exit_code == 0
    assert len(seen) == 1 and "HBMCOMM_INSTEAD_OF" not in seen[0]


def test_gloo_stays_gloo_in_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HBMCOMM_INSTEAD_OF", "all")
    assert launch(1, os.getenv, "HBMCOMM_INSTEAD_OF") == [None]


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys, torch_hbmcomm.cli; "
        "from typer.testing import CliRunner; "
        "result = CliRunner().invoke(torch_hbmcomm.cli.app, ['--help']); "
        "assert result.exit_code == 0, result.output; "
        "assert 'torch' not in sys.modules"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environ, check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["info", "--help"],
        ["bench", "collectives", "--help"],
        ["bench", "ddp", "--help"],
        ["bench", "box", "--help"],
    ],
)
def test_help(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 0


def test_the_help_says_how_a_box_serves_other_machines() -> None:
    shown = " ".join(invoke("serve", "--help").output.replace("│", " ").split())
    assert "0.0.0.0 is every interface" in shown
    assert "repeat it for more addresses" in shown


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output == f"hbmcomm {torch_hbmcomm.__version__}\n"


def test_every_setting_that_the_sources_name_is_known() -> None:
    sources = [
        *(ROOT / "csrc").rglob("*.cpp"),
        *(ROOT / "csrc").rglob("*.h"),
        *(ROOT / "torch_hbmcomm").rglob("*.py"),
    ]
    named = {
        name for path in sources for name in re.findall(r'"(HBMCOMM_[A-Z_]+)"', path.read_text())
    }
    assert named - set(variables.VARIABLES) == set()


def test_every_setting_that_is_documented_is_known() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    assert set(re.findall(r"`(HBMCOMM_[A-Z_]+)", page)) == set(variables.VARIABLES)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "none"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "by hand"),
        ({"PMI_RANK": "0", "PMI_FD": "7"}, "mpiexec"),
        ({"SLURM_STEP_ID": "0", "PMI_RANK": "0"}, "srun"),
        ({"TORCHELASTIC_RUN_ID": "x", "SLURM_STEP_ID": "0", "RANK": "0"}, "torchrun"),
        ({"SLURM_JOB_ID": "1"}, "none"),
    ],
)
def test_launcher(environ: dict[str, str], name: str) -> None:
    assert environment.launcher(environ)[0] == name


def test_sizes() -> None:
    assert [parse_bytes(text) for text in ("8", "4 KiB", "64MiB")] == [8, 4096, 64 << 20]
    assert parse_bytes("10TiB") == 10 << 40
    assert [format_bytes(count) for count in (8, 4096, 1536, 64 << 20)] == [
        "8 B", "4 KiB", "1.5 KiB", "64 MiB",
    ]  # fmt: skip
    for text in ("", "0", "-8", "8KB", "many"):
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["collectives", "--collectives", "allreduce,gossip"], ["gossip", "reduce_scatter"]),
        (["collectives", "--contenders", "carrier-pigeon"], ["carrier-pigeon", "hbm-staged"]),
        (["collectives", "--dtype", "float32,float31"], ["float31", "bfloat16"]),
        (["collectives", "--sizes", "8,lots"], ["lots", "KiB"]),
        (["collectives", "--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json", "directory"]),
        (["ddp", "--contenders", "carrier-pigeon"], ["carrier-pigeon", "hbm-mpi"]),
        (["ddp", "--models", "of-the-world"], ["of-the-world", "compute-bound"]),
    ],
)
def test_bench_refuses_unknown_names(arguments: list[str], expected: list[str]) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    for word in expected:
        assert word in result.output


def test_bench_says_who_cannot_take_part() -> None:
    result = invoke("bench", "collectives", "--contenders", "gloo,mpich", "--dtype", "bfloat16")
    assert result.exit_code == 1
    assert "mpich: it takes float32" in result.stderr


def bench_collectives(file: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark; return its output and the JSON that it wrote."""
    result = run("bench", "collectives", "--json", str(file), *arguments)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.split()), json.loads(file.read_text())


def rows(document: dict[str, Any]) -> dict[tuple[str, str, int], list[str]]:
    """Return the contenders of each row."""
    found: dict[tuple[str, str, int], list[str]] = {}
    for entry in document["measurements"]:
        row = (entry["collective"], entry["dtype"], entry["bytes"])
        found.setdefault(row, []).append(entry["contender"])
    return found


@pytest.mark.full
def test_bench_measures_every_collective(tmp_path: Path) -> None:
    """Results must be right: the bench checks a contender's results before it takes times."""
    pytest.importorskip("mpi4py")
    everyone = ["hbm-zero-copy", "hbm-staged", "hbm-mpi", "gloo", "mpich"]
    _, document = bench_collectives(
        tmp_path / "out.json",
        *("--contenders", ",".join([*everyone, "nothing"]), "--sizes", "8,1MiB"),
        *("--rounds", "1", "--startup-rounds", "0"),
    )
    measured = rows(document)
    for collective in set(COLLECTIVES) - {"barrier"}:
        assert measured[collective, "float32", 8] == [*everyone, "nothing"]
        assert measured[collective, "float32", 1 << 20] == everyone
    assert measured["barrier", "float32", 0] == [*everyone, "nothing"]
    assert document["references"] == ["nothing"]


def test_bench_writes_json(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    shown, document = bench_collectives(
        tmp_path / "out.json",
        *("--contenders", "gloo,mpich", "--collectives", "allreduce", "--sizes", "8"),
        *("--dtype", "float32,bfloat16", "--rounds", "3", "--startup-rounds", "1"),
    )
    assert "2 ranks, 3 rounds" in shown
    assert "x is a ratio of medians" in shown
    assert "not measured: mpich, bfloat16" in shown
    assert set(document) == {
        "benchmark", "machine", "plan", "sections", "contenders", "references", "unavailable",
        "notes", "measurements",
    }  # fmt: skip
    assert document["plan"] == {"ranks": 2, "rounds": 3, "startup_rounds": 1}
    assert set(document["machine"]) == {
        "cpu", "cores", "python", "torch", "torch_hbmcomm", "commit", "modified", "time",
    }  # fmt: skip
    assert list(document["contenders"]) == ["gloo", "mpich"]
    assert set(document["unavailable"]) == {"mpich, bfloat16"}
    assert rows(document) == {
        ("allreduce", "float32", 8): ["gloo", "mpich"],
        ("allreduce", "bfloat16", 8): ["gloo"],
        ("startup", "float32", 0): ["gloo"],
    }
    statistics = set(Summary.names("", "us").values()) - {"p99_us"}
    for entry in document["measurements"]:
        of = {"collective", "dtype", "bytes", "contender", "calls_per_sample"}
        interleaved = (entry["collective"], entry["dtype"]) == ("allreduce", "float32")
        alone = {f"alone_{name}" for name in statistics} if interleaved else set()
        assert set(entry) - {"p99_us", "alone_p99_us"} == of | statistics | alone
        starts = entry["collective"] == "startup"
        assert entry["n"] == 1 if starts else entry["n"] >= 3
        ordered = ["minimum", "lower_quartile", "median", "upper_quartile", "maximum"]
        values = [entry[f"{name}_us"] for name in ordered]
        assert values == sorted(values)


@pytest.fixture
def two_contenders() -> Found:
    def took(collective: str, contender: str, *microseconds: float) -> Measurement:
        of = {"collective": collective, "dtype": "float32", "bytes": 8}
        return sampled(of, contender, microseconds, alone=[20.0] if "o" in contender else ())

    return Found(
        benchmark="collectives",
        machine={"cpu": "a processor", "cores": 2, "torch": "2"},
        plan={"ranks": 2, "rounds": 1},
        contenders={"hbm-staged": "ours", "gloo": "theirs"},
        unavailable={"mpich": "not here"},
        measurements=[
            took("allreduce", "hbm-staged", 10.0),
            took("allreduce", "gloo", 15.0, 30.0, 90.0),
            took("broadcast", "hbm-staged", 10.0),
            took("broadcast", "gloo", 5.0),
        ],
    )


def rendered(renderable: RenderableType) -> str:
    console = Console(force_terminal=True, color_system="standard", width=100)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_table_compares_with_the_first_and_marks_slower_ones(two_contenders: Found) -> None:
    lines = rendered(collectives.render(two_contenders)).splitlines()
    faster = next(line for line in lines if "3.00x" in line)
    slower = next(line for line in lines if "0.50x" in line)
    red = "\x1b[31m"
    assert red not in faster
    assert red in slower
    assert any("not measured: mpich: not here" in line for line in lines)


def test_table_shows_how_single_calls_spread(two_contenders: Found) -> None:
    shown = rendered(collectives.render(two_contenders))
    for word in ("30.0 µs", "min 15.0 µs", "mean 45.0 µs"):
        assert word in shown


def test_table_shows_contenders_slowed_by_interleaving(two_contenders: Found) -> None:
    shown = rendered(collectives.render(two_contenders))
    assert "alone 20.0 µs, 2.00x" in shown
    assert shown.count("2.00x") == 1, "not of broadcast, where it does no worse"


def test_times_are_written_with_three_digits() -> None:
    written = [format_time(us) for us in (0.5, 9.876, 98.76, 999.7, 12_345, 2_500_000)]
    assert written == ["0.50 µs", "9.88 µs", "98.8 µs", "1.00 ms", "12.3 ms", "2.50 s"]


def test_ddp_table_tells_what_communication_adds() -> None:
    samples = {"step": 30_000.0, "step without communication": 24_000.0, "allreduce alone": 8_000.0}
    result = Found(
        benchmark="ddp",
        machine={"cpu": "a processor", "cores": 2, "torch": "2"},
        plan={"ranks": 2, "rounds": 1},
        sections={"small": "a small model"},
        contenders={"hbm": ""},
        measurements=[
            sampled({"model": "small", "phase": phase}, "hbm", [time])
            for phase, time in samples.items()
        ],
    )
    shown = rendered(ddp.render(result))
    for word in ("30.0 ms", "24.0 ms", "6.00 ms", "8.00 ms", "25%", "a small model"):
        assert word in shown


@pytest.mark.full
def test_ddp_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "ddp.json"
    result = run("bench", "ddp", "--rounds", "1", "--models", "compute-bound", "--json", str(file))
    assert result.returncode == 0, result.stderr
    document = json.loads(file.read_text())
    assert list(document["sections"]) == ["compute-bound"]
    measured = [(entry["contender"], entry["phase"]) for entry in document["measurements"]]
    phases = ["step", "step without communication", "allreduce alone"]
    assert measured == [(name, phase) for name in ("hbm", "gloo") for phase in phases]
