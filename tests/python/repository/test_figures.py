"""`make figures`: records of measured figures, their commits, and the pages that name them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import figures  # noqa: E402

MEASURED = {"benchmarks/*.json": ["csrc/kernels", "bench.py"], "papers/*.jsonl": ["csrc/box"]}
PAGE = """\
# The title

## Measured

Record `benchmarks/sums-2-ranks.json`.

| | hbm | Gloo |
| --- | --- | --- |
| 8 B | 3.5 µs | **107 µs** |

### Rows

| | accuracy |
| --- | --- |
| plain | 98.9 |

## Without

| | hbm |
| --- | --- |
| 1 MiB | 18 µs |

| name | meaning |
| --- | --- |
| `a` | 3 words here |
"""


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()


def commit(folder: Path, files: Mapping[str, str]) -> str:
    """Commit these files, and return the commit."""
    write(folder, files)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")


def record(measured_at: str | None, modified: Sequence[str] = ()) -> str:
    machine = {"commit": measured_at, "modified": list(modified)} if measured_at else {}
    return json.dumps({"machine": {**machine, "time": "2026-11-23T03:16:36+00:00"}})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    sources = dict.fromkeys(("csrc/kernels/sum.h", "csrc/box/box.h", "bench.py", "other"), "")
    at = commit(tmp_path, sources)
    rows = json.dumps({"share": 1.0, "commit": at, "modified": ["other"]}) + "\n"
    files = {"benchmarks/sums-2-ranks.json": record(at), "papers/seeds.jsonl": rows}
    commit(tmp_path, files | {"README.md": PAGE, "docs/README.md": "[x](../papers/seeds.jsonl)"})
    return tmp_path


def states(repository: Path) -> list[tuple[str, str]]:
    return [(line.state, line.why) for line in figures.lines(repository, MEASURED)]


def test_a_record_is_current_until_its_folders_change(repository: Path) -> None:
    commit(repository, {"other": "changed"})
    at = git(repository, "rev-parse", "HEAD~2")[:12]
    assert states(repository) == [(figures.CURRENT, at), (figures.CURRENT, at)]
    sums, seeds = figures.lines(repository, MEASURED)
    assert (sums.record, sums.pages) == ("benchmarks/sums-2-ranks.json", ("README.md",))
    assert (seeds.record, seeds.pages) == ("papers/seeds.jsonl", ("docs/README.md",))


def test_a_stale_record_is_found(repository: Path) -> None:
    at = git(repository, "rev-parse", "HEAD~1")[:12]
    commit(repository, {"csrc/kernels/sum.h": "faster"})
    write(repository, {"csrc/box/box.h": "not committed"})
    assert states(repository) == [
        (figures.STALE, f"{at}, then 1 files changed in csrc/kernels"),
        (figures.STALE, f"{at}, then 1 files changed in csrc/box"),
    ]


def test_a_record_without_a_proof_is_named(repository: Path) -> None:
    at = git(repository, "rev-parse", "HEAD")
    file = "benchmarks/sums-2-ranks.json"
    changed = record(at, ["csrc/kernels/sum.h", "other"])
    for text, why in (
        (record(None), "no commit, measured 2026-11-23"),
        (changed, f"{at[:12]} with changes in csrc/kernels/sum.h"),
        (record("0" * 40), "000000000000 is no commit of this repository"),
    ):
        write(repository, {file: text})
        assert states(repository)[0] == (figures.UNPROVEN, why)


def test_a_record_is_as_good_as_its_worst_row(repository: Path) -> None:
    file = repository / "papers" / "seeds.jsonl"
    file.write_text(file.read_text() + json.dumps({"share": 0.5}) + "\n")
    assert states(repository)[1] == (figures.UNPROVEN, "no commit")


def test_a_table_of_figures_without_a_record_is_found(repository: Path) -> None:
    assert list(figures.without_record(repository)) == ['README.md, "Without"']


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ({}, r"sums-2-ranks\.json matches 0 rows"),
        (MEASURED | {"*/sums*": ["bench.py"]}, r"sums-2-ranks\.json matches 2 rows"),
        (MEASURED | {"papers/*.json": ["bench.py"]}, r"no record matches papers/\*\.json"),
        (MEASURED | {"papers/*.jsonl": ["csrc/gone"]}, r"measures csrc/gone, which does not exist"),
    ],
)
def test_a_wrong_table_of_records_is_refused(
    repository: Path, table: Mapping[str, Sequence[str]], cause: str
) -> None:
    with pytest.raises(figures.TableError, match=cause):
        figures.lines(repository, table)


def test_make_figures_has_a_line_for_each_record_of_the_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures.lines(ROOT, figures.RECORDS)  # read once: another process may change the files
    monkeypatch.setattr(figures, "lines", lambda root, table: found)
    status = figures.main()
    printed = capsys.readouterr().out
    assert status == any(line.state == figures.STALE for line in found)
    for line in found:
        assert f"{line.state:8}  {line.record}  {line.why}" in printed
    assert f"\n{len(found)} records: " in printed
