"""papers.outer_steps: measurements, refusals, and the seconds until a quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import NoNamespaces, two_nodes
from papers.outer_steps import __main__ as outer_steps
from papers.outer_steps import soonest
from papers.plot import plot_records
from torch_hbmcomm.bench import checkout


@pytest.fixture(autouse=True)
def sleeping_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let idle OpenMP threads sleep: on a busy machine, spinning ones would delay all ranks."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> list[dict[str, Any]]:
    file = folder / "rows.jsonl"
    monkeypatch.setattr("sys.argv", ["outer_steps", *options, "--json", str(file)])
    outer_steps.main()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_contenders_send_parts_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = ["plain", "low-rank", "outer,every=5,dtype=int8,fragments=5,delay=1"]
    options = ["--workers", "2", "--steps", "20", "40", "--contenders", *contenders]
    rows = run(monkeypatch, tmp_path, *options)
    assert [row["contender"] for row in rows] == 2 * contenders
    assert all(checkout.state().items() <= row.items() for row in rows)
    assert rows[3]["share"] == 1
    assert rows[4]["share"] == pytest.approx(0.13, abs=0.02)  # the first ten steps send more
    assert 0.05 < rows[5]["share"] < 0.09  # a fourth of a fifth, the scales, and close()
    for row in rows[3:]:
        assert row["steps_at"] == list(range(2, 41, 2))
        assert len(row["quality_at"]) == len(row["seconds_at"]) == 20
        assert row["examples_a_step"] == 16
        assert row["to_target"] is not None and row["lost_seconds"] == 0
    shown = capsys.readouterr().out
    assert "digits, SGD, 40 steps, 2 workers" in shown
    assert "seconds, best of 20, 40 steps" in shown
    pytest.importorskip("matplotlib")
    plot_records("\n".join(map(json.dumps, rows)), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_survivors_of_a_killed_worker_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--workers", "3", "--steps", "20", "--kill-at", "7", "--contenders"]
    ways = ["plain", "low-rank", "outer,every=5", "boxes,every=5"]
    rows = run(monkeypatch, tmp_path, *options, *ways)
    assert all(row["steps_at"][-1] == 20 for row in rows)
    assert all(row["lost_seconds"] > 0 for row in rows[:-1])
    assert rows[-1]["lost_seconds"] == 0  # over boxes no worker notices


@pytest.mark.full
def test_a_slow_worker_takes_fewer_steps_over_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with two_nodes(None):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))
    options = ["--workers", "2", "--steps", "60", "--megabits", "1000", "--slow", "3"]
    contenders = ["plain", "outer,every=3,pace=1", "boxes,every=3,pace=1"]
    plain, *others = run(monkeypatch, tmp_path, *options, "--contenders", *contenders)
    assert plain["crossed_mb"] > plain["sent_mb"]  # headers
    for row in others:
        assert row["sent_mb"] < row["crossed_mb"] < plain["crossed_mb"] / 2
        assert row["seconds_at"] == sorted(row["seconds_at"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--contenders", "plain", "carrier-pigeon"], "carrier-pigeon"),
        (["--contenders", "outer,often"], "often"),
        (["--steps", "3"], "--steps is at least 20"),
        (["--steps", "60", "--contenders", "outer,pace=1"], "a multiple of 1000"),
        (["--slow", "5", "--contenders", "boxes"], "boxes needs the term pace=1"),
    ],
)
def test_impossible_arguments_are_refused(
    options: Sequence[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, *options)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_torchft_is_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--contenders", "torchft")
    assert "make test-libraries" in capsys.readouterr().err


def row(contender: str, steps: int, seconds: float, quality: float) -> dict[str, Any]:
    """Return a row of a training whose quality grows in two evaluations."""
    return {
        "contender": contender,
        **{"task": "digits", "optimizer": "SGD", "rate": 0.1, "workers": 4},
        **{"megabits": 100, "slow": 1, "kill_at": None},
        "steps": steps,
        "seconds_at": [seconds / 2, seconds],
        "quality_at": [quality / 2, quality],
    }


ROWS = [
    row("plain", 100, 10, 80),
    row("plain", 200, 20, 98),
    row("outer", 100, 2, 60),
    row("outer", 400, 16, 96),
]


@pytest.mark.parametrize(
    ("aim", "plain", "outer"),
    [
        (40, 5, 2),
        (48, 10, 2),
        (80, 10, 16),
        (97, 20, None),
        (99, None, None),
    ],
)
def test_each_way_reaches_a_quality_with_its_best_number_of_steps(
    aim: float, plain: float | None, outer: float | None
) -> None:
    assert soonest.soonest(ROWS, aim) == {"plain": plain, "outer": outer}


def test_a_record_shows_the_seconds_until_a_quality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "rows.jsonl"
    record.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    monkeypatch.setattr("sys.argv", ["soonest", str(record), "--reach", "97", "80"])
    soonest.main()
    shown = capsys.readouterr().out
    assert "seconds, best of 100, 200, 400 steps, 100 Mbit/s" in " ".join(shown.split())
    cells = [line.replace("│", " ").split() for line in shown.splitlines()]
    assert cells.index(["80.000", "10.0", "16.0"]) < cells.index(["97.000", "20.0", "never"])
