"""The file of metrics that a rank writes from its totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torch_hbmcomm.profiling import metrics


def total(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "all_reduce",
        "limit": 4096,
        "path": "shm",
        "data": "staged",
        "last_rank": -1,
        "calls": 1,
        "bytes": 40,
        "transit": 2_000_000_000,
        "hidden": 500_000_000,
        "waiting": 0,
        **changes,
    }


class Native:
    """Stands in for the native module."""

    def __init__(self, rank: int, totals: list[dict[str, Any]]) -> None:
        self.found = {"rank": rank, "uncounted": 3, "totals": totals}
        self.warnings: list[str] = []

    def profile_totals(self) -> dict[str, Any]:
        return self.found

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def replace_native(monkeypatch: pytest.MonkeyPatch, native: Native) -> None:
    monkeypatch.setattr(metrics, "load", lambda: native)


def test_totals_of_one_label_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals of each last rank are apart. Only the waiting is shown by it."""
    of_last = [total(last_rank=rank, waiting=1_500_000_000) for rank in (1, 1, 2)]
    large = total(limit=0, data="staged, zero-copy", path="shm, MPI")
    replace_native(monkeypatch, Native(5, [total(), *of_last, large]))
    metrics._Writer(tmp_path / "made").write()
    (file,) = (tmp_path / "made").iterdir()
    assert file.name == "hbmcomm-rank-5.prom"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    small = 'kind="all_reduce",path="shm",rank="5",size="to 4 KiB"'
    other = 'data="staged, zero-copy",kind="all_reduce",path="shm, MPI",rank="5",size="over 16 MiB"'
    by_name = {ordered(line): float(line.split()[-1]) for line in lines}
    assert by_name == {
        f'hbmcomm_operation_calls_total{{data="staged",{small}}}': 4,
        f"hbmcomm_operation_calls_total{{{other}}}": 1,
        f'hbmcomm_operation_bytes_total{{data="staged",{small}}}': 160,
        f"hbmcomm_operation_bytes_total{{{other}}}": 40,
        f'hbmcomm_operation_transit_seconds_total{{data="staged",{small}}}': 8,
        f"hbmcomm_operation_transit_seconds_total{{{other}}}": 2,
        f'hbmcomm_operation_hidden_seconds_total{{data="staged",{small}}}': 2,
        f"hbmcomm_operation_hidden_seconds_total{{{other}}}": 0.5,
        f"hbmcomm_operation_waiting_seconds_total{{{with_last(small, 1)}}}": 3,
        f"hbmcomm_operation_waiting_seconds_total{{{with_last(small, 2)}}}": 1.5,
        'hbmcomm_operation_uncounted_total{rank="5"}': 3,
    }


def with_last(labels: str, rank: int) -> str:
    return labels.replace(",path=", f',last_rank="{rank}",path=')


def ordered(line: str) -> str:
    """Return the name and labels of a sample, with the labels in the order of their names."""
    name, _, rest = line.partition("{")
    labels = rest.rpartition("}")[0].split('",')
    return f"{name}{{{','.join(sorted(each.removesuffix(chr(34)) + chr(34) for each in labels))}}}"


def test_a_process_that_is_no_rank_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Native(-1, [])
    replace_native(monkeypatch, native)
    writer = metrics._Writer(tmp_path)
    writer.write()
    assert list(tmp_path.iterdir()) == []
    native.found["rank"] = 1
    writer.write()
    native.found["rank"] = 0  # of another group: the counters stay in one file
    writer.write()
    assert [file.name for file in tmp_path.iterdir()] == ["hbmcomm-rank-1.prom"]


def test_a_rank_that_changes_moves_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of a default group change places. Each removes only a file of its own."""
    replace_native(monkeypatch, Native(0, []))
    writers = [metrics._Writer(tmp_path), metrics._Writer(tmp_path)]

    def write(writer: int, rank: int) -> list[str]:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        writers[writer].write()
        return sorted(file.name for file in tmp_path.iterdir())

    assert write(0, 3) == ["hbmcomm-rank-3.prom"]
    assert write(0, 2) == ["hbmcomm-rank-2.prom"]
    assert write(1, 3) == ["hbmcomm-rank-2.prom", "hbmcomm-rank-3.prom"]
    assert write(0, 3) == ["hbmcomm-rank-3.prom"]
    assert write(1, 2) == ["hbmcomm-rank-2.prom", "hbmcomm-rank-3.prom"]
    monkeypatch.undo()
    replace_native(monkeypatch, Native(0, []))
    writers[1].write()  # without a default group
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "hbmcomm-rank-2.prom",
        "hbmcomm-rank-3.prom",
    ]


def test_a_default_group_may_end_while_its_rank_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> int:
        raise ValueError("Default process group has not been initialized")

    replace_native(monkeypatch, Native(4, []))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", none)
    metrics._Writer(tmp_path).write()
    assert [file.name for file in tmp_path.iterdir()] == ["hbmcomm-rank-4.prom"]


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Native(0, [])
    replace_native(monkeypatch, native)
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    writer = metrics._Writer(folder)
    writer.write()
    writer.write()
    (warning,) = native.warnings
    assert warning.startswith(f"HBMCOMM_METRICS={folder}: the metrics cannot be written: ")


def test_a_folder_that_is_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Native(0, [])
    replace_native(monkeypatch, native)

    def write(*_: object) -> None:
        raise FileNotFoundError("removed by another process")

    monkeypatch.setattr(metrics, "write_to_textfile", write)
    metrics._Writer(tmp_path).write()
    (warning,) = native.warnings
    assert warning.endswith("the metrics cannot be written: removed by another process")
