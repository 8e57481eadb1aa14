"""papers.outer_steps: measurements, refusals, and the lengths at which outer steps are ahead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import NoNamespaces, two_nodes
from papers.outer_steps import __main__ as outer_steps
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
    assert f"{contenders[2]} is ahead of plain" in shown
    pytest.importorskip("matplotlib")
    plot_records("\n".join(map(json.dumps, rows)), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_survivors_of_a_killed_worker_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--workers", "3", "--steps", "20", "--kill-at", "7", "--contenders"]
    rows = run(monkeypatch, tmp_path, *options, "plain", "low-rank", "outer,every=5")
    for row in rows:
        assert row["steps_at"][-1] == 20
        assert row["lost_seconds"] > 0


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
    contenders = ["plain", "outer,every=3,pace=1"]
    plain, outer = run(monkeypatch, tmp_path, *options, "--contenders", *contenders)
    assert plain["crossed_mb"] > plain["sent_mb"]  # headers
    assert outer["crossed_mb"] < plain["crossed_mb"] / 2
    assert outer["seconds_at"] == sorted(outer["seconds_at"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--contenders", "plain", "carrier-pigeon"], "carrier-pigeon"),
        (["--contenders", "outer,often"], "often"),
        (["--steps", "3"], "--steps is at least 20"),
        (["--steps", "60", "--contenders", "outer,pace=1"], "a multiple of 1000"),
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
        "steps": steps,
        "examples_a_step": 1,
        "steps_at": [steps // 2, steps],
        "seconds_at": [seconds / 2, seconds],
        "quality_at": [quality / 2, quality],
    }


def test_outer_steps_are_ahead_from_a_length_on() -> None:
    rows = [
        row("plain", 100, 10, 80),
        row("plain", 200, 20, 90),
        row("plain", 400, 40, 95),
        row("outer,every=50", 100, 2, 60),
        row("outer,every=50", 200, 4, 70),
        row("outer,every=50", 400, 12, 94.6),
    ]
    assert list(outer_steps.ahead(rows)) == [
        "outer,every=50 is ahead of plain from 200 steps on (of 100, 200, 400)"
    ]
    rows[-1]["quality_at"] = [50, 94]  # farther from 95 than chance
    assert list(outer_steps.ahead(rows)) == [
        "outer,every=50 is ahead of plain never (of 100, 200, 400)"
    ]
    assert list(outer_steps.ahead(rows[:1])) == []
