"""papers.layer_drop.automatic: its table and record, on a machine without hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.layer_drop import automatic
from torch_hbmcomm.bench.result import Result

_SMALL = ["--pairs", "2", "--steps", "3", "--width", "16", "--batch", "4"]


def test_auto_is_compared_with_plain_ddp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    options = [*_SMALL, "--megabits", "shared memory", "--json", str(record)]
    monkeypatch.setattr("sys.argv", ["automatic", *options])
    automatic.main()
    shown = capsys.readouterr().out
    assert "2 pairs of 3 steps" in shown
    assert shown.count("shared memory") == 2
    assert shown.count("none yet (2)") == 2, "three steps are too few for a choice"
    found = Result.from_json(record.read_text())
    assert found.plan["pairs"] == 2
    plain, *hooks = found.measurements
    assert (plain.contender, plain.summary.n) == ("plain", 2)
    assert [one.contender for one in hooks] == ["low_rank", "layer_drop"]
    for one in hooks:
        assert one.curves["chosen_ratio"] == [-1, -1]
        ratios = [
            ours / theirs
            for ours, theirs in zip(one.curves["seconds"], plain.curves["seconds"], strict=True)
        ]
        assert one.values["paired_share"] == pytest.approx(sum(ratios) / 2)


def test_one_pair_has_no_spread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*_SMALL, "--pairs", "1", "--hooks", "low_rank", "--megabits", "shared memory"]
    monkeypatch.setattr("sys.argv", ["automatic", *options])
    automatic.main()
    row = next(line for line in capsys.readouterr().out.splitlines() if "low_rank" in line)
    assert [cell.strip() for cell in row.split("│")][6] == "-", row


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hooks", "bf16"], "no hook 'bf16'; there are: low_rank, layer_drop"),
        (["--json", "/nowhere/record.json"], "/nowhere/record.json: there is no such directory"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["automatic", *options])
    with pytest.raises(SystemExit):
        automatic.main()
    assert complaint in capsys.readouterr().err
