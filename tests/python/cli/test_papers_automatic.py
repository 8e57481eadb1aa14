"""papers.layer_drop.automatic: its table, on a machine without hosts."""

from __future__ import annotations

import pytest

from papers.layer_drop import automatic


def test_auto_is_compared_with_plain_ddp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--pairs", "2", "--steps", "3", "--width", "16", "--batch", "4"]
    monkeypatch.setattr("sys.argv", ["automatic", *options, "--megabits", "shared memory"])
    automatic.main()
    shown = capsys.readouterr().out
    assert "2 pairs of 3 steps" in shown
    assert "shared memory" in shown
    assert "none yet (2)" in shown, "three steps are too few for a choice"
