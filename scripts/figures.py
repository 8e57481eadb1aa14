"""Checks that the measured figures in README.md and docs/*.md are of the present code.

    python3 scripts/figures.py

A figure comes from a record: a file of benchmarks/ or papers/ that a benchmark wrote, with the
commit of the measured code. The script prints a line for each record, with one of these states, and
the pages that name the record:

    current     the record's folders have not changed since its commit
    stale       they have changed: measure again
    unproven    the record has no commit, a file of its folders had changes that were not committed,
                or this repository lacks the commit (a shallow clone does)

Then it lists the sections that have a table of figures, and name no record. The exit status is 1 if
a record is stale, 2 if RECORDS is wrong. Figures in sentences are not found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CURRENT, STALE, UNPROVEN = "current", "stale", "unproven"

_TIMES = ["torch_hbmcomm/bench/rounds.py"]
_KERNELS = ["csrc/base", "csrc/kernels", "csrc/memory"]
_COLLECTIVES = [
    *_KERNELS,
    *("csrc/communicator", "csrc/process_group", "csrc/progress", "csrc/pg_hbm.cpp"),
]
_COLLECTIVE_BENCHMARK = [
    *(*_COLLECTIVES, *_TIMES, "torch_hbmcomm/bench/collectives.py"),
    *("benchmarks/collectives", "benchmarks/native"),
]
_BOX = [*_KERNELS, "csrc/box", "csrc/smb_client.cpp", "torch_hbmcomm/smb"]
_BOX_BENCHMARK = [*_BOX, *_TIMES, "torch_hbmcomm/bench/box.py", "benchmarks/box"]
_START = ["csrc/bootstrap", "torch_hbmcomm/backend.py", "torch_hbmcomm/rendezvous.py"]
_SCALING = [*_COLLECTIVES, *_START, "benchmarks/scaling"]
_COMPRESSION = [
    *("csrc/error_feedback.cpp", "csrc/layerdrop.cpp", "csrc/low_rank.cpp"),
    *("torch_hbmcomm/error_feedback", "torch_hbmcomm/layer_drop", "torch_hbmcomm/low_rank"),
]
_DROPPING = [*_COLLECTIVES, *_COMPRESSION, "torch_hbmcomm/parameter_server", "papers/layer_drop"]
_PLACEMENT = ["csrc/memory", "torch_hbmcomm/memory.py", "papers/placement", "tests/vm/guest"]

# The files and folders that each record measures, and the programs that measure it. A row is for
# the records that match its pattern, and each record matches one row.
RECORDS: dict[str, Sequence[str]] = {
    "benchmarks/bfloat16-2-ranks.json": _COLLECTIVE_BENCHMARK,
    "benchmarks/box-2-cores.json": [*_BOX_BENCHMARK, "benchmarks/native"],
    "benchmarks/boxes-2-cores.json": [
        *(*_BOX, "torch_hbmcomm/parameter_server"),
        *("benchmarks/box/boxes.py", "benchmarks/box/boxes_worker.py"),
    ],
    "benchmarks/collectives-*.json": _COLLECTIVE_BENCHMARK,
    "benchmarks/ddp-*.json": [*_COLLECTIVES, *_TIMES, "torch_hbmcomm/bench/ddp.py"],
    "benchmarks/failures-*.json": [*_COLLECTIVES, *_START, "benchmarks/failures.py"],
    "benchmarks/gpu-*.json": [*_COLLECTIVES, *_TIMES, "benchmarks/gpu.py"],
    "benchmarks/headline-*.json": _COLLECTIVE_BENCHMARK,
    "benchmarks/heal-*.json": [
        *(*_COLLECTIVES, *_START, "torch_hbmcomm/reconfiguration.py", "benchmarks/heal.py"),
    ],
    "benchmarks/mpi-*.json": _COLLECTIVE_BENCHMARK,
    "benchmarks/native-*.json": _COLLECTIVE_BENCHMARK,
    "benchmarks/over-mpi-*.json": _COLLECTIVE_BENCHMARK,
    "benchmarks/profile-cases-*.json": [
        *(*_COLLECTIVES, "csrc/bindings/profile_bindings.cpp", "torch_hbmcomm/profiling"),
        *("benchmarks/pairs.py", "benchmarks/profile_cases.py"),
    ],
    "benchmarks/profile-cost-*.json": [
        *(*_COLLECTIVES, "csrc/bindings/profile_bindings.cpp", "torch_hbmcomm/profiling"),
        *("torch_hbmcomm/bench/ddp.py", "benchmarks/pairs.py", "benchmarks/profile_cost.py"),
    ],
    "benchmarks/scaling-*.json": _SCALING,
    "benchmarks/slots-*.json": _COLLECTIVE_BENCHMARK,
    "papers/async-sgd-*.json": [*_BOX, "torch_hbmcomm/parameter_server", "papers/async_sgd"],
    "papers/automatic-*.json": [*_COLLECTIVES, *_COMPRESSION, "papers/layer_drop"],
    "papers/layerdrop-2-cores.json": _DROPPING,
    "papers/layerdrop-pass-*.json": [*_KERNELS, *_COMPRESSION, "papers/layer_drop"],
    "papers/layerdrop-accuracy.jsonl": [*_COMPRESSION, "papers/layer_drop"],
    "papers/layerdrop-layers-accuracy.jsonl": [*_COMPRESSION, "papers/layer_drop"],
    "papers/layerdrop-100-megabits.jsonl": [*_COLLECTIVES, *_COMPRESSION, "papers/layer_drop"],
    "papers/layerdrop-ranks-accuracy.jsonl": [
        *(*_COMPRESSION, "torch_hbmcomm/parameter_server", "papers/layer_drop"),
    ],
    "papers/layerdrop-sharded.jsonl": [
        *(*_COMPRESSION, "torch_hbmcomm/sharded", "papers/layer_drop"),
    ],
    "papers/outer-steps*.jsonl": [
        *("torch_hbmcomm/outer_steps", "papers/layer_drop/tasks.py"),
        *(f"papers/outer_steps/{name}.py" for name in ("__main__", "rank", "ways")),
    ],
    "papers/records/async-sgd.json": [*_BOX, "papers/async_sgd"],
    "papers/records/box-clients.json": _BOX_BENCHMARK,
    "papers/records/connections-*.json": _BOX_BENCHMARK,
    "papers/records/containers*.json": [*_COLLECTIVE_BENCHMARK, "papers/containers"],
    "papers/records/gather-*.json": _COLLECTIVE_BENCHMARK,
    "papers/records/images.json": [
        *(*_COLLECTIVES, "benchmarks/native", "benchmarks/collectives/native.py", "papers/images"),
    ],
    "papers/records/layer-drop*.json": _DROPPING,
    "papers/records/memory-modes.json": _PLACEMENT,
    "papers/records/messages.json": [*_BOX, "benchmarks/native", "papers/connections"],
    "papers/records/nodes-*.json": [*_COLLECTIVES, "benchmarks/collectives"],
    "papers/records/placement.json": _PLACEMENT,
    "papers/records/scaling.json": _SCALING,
    "papers/records/small-*.json": _COLLECTIVE_BENCHMARK,
    "papers/records/verbs.json": [*_BOX, "papers/verbs.py", "tests/vm"],
    "papers/records/whole-*.json": _COLLECTIVE_BENCHMARK,
}

_NAMED = re.compile(r"(?<![\w-])(?:benchmarks|papers)/[\w./*+-]+\.jsonl?\b")
_PAGE_OF_RECORDS = "papers/records/report.md"  # is made of papers/records/*.json
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"\**[+<>-]?\d[\d.,]* ?(ns|µs|ms|s|B|[KMG]i?B|[KMG]i?B/s|%|x)?\**")


class TableError(ValueError):
    """RECORDS does not fit the repository. The text names the record or path, and the remedy."""


class Origin(NamedTuple):
    """The origin of a record, or of some rows of a record."""

    commit: str | None
    modified: tuple[str, ...]  # tracked files that differed from the commit
    time: str | None  # of the measurement


class Line(NamedTuple):
    """The state of a record."""

    state: str
    record: str
    why: str  # the commit, or the reason for another state than "current"
    pages: tuple[str, ...]  # the pages that name the record


def lines(root: Path, table: Mapping[str, Sequence[str]]) -> list[Line]:
    """Return the states of all records. Raises TableError."""
    records = _records(root)
    if unused := [row for row in table if not any(fnmatchcase(one, row) for one in records)]:
        raise TableError(f"RECORDS: no record matches {', '.join(unused)}: remove the row")
    named = {page: _NAMED.findall(path.read_text()) for page, path in _pages(root).items()}
    found = []
    for record in records:
        state, why = _state(root, record, _measured(root, record, table))
        pages = [page for page, them in named.items() if any(fnmatchcase(record, x) for x in them)]
        found.append(Line(state, record, why, tuple(pages)))
    return found


def without_record(root: Path) -> Iterator[str]:
    """Yield the page and heading of each table of figures whose section names no record.

    The sections around it count too, except the page's introduction.
    """
    for page, path in _pages(root).items():
        chain: list[tuple[int, str, str]] = []  # level, heading and text of the sections around
        for level, heading, text in _sections(path.read_text()):
            chain = [*(one for one in chain if one[0] < level), (level, heading, text)]
            around = "".join(text for level, _, text in chain if level > 1)
            recorded = _NAMED.search(around) or _PAGE_OF_RECORDS in around
            if not recorded and any(map(_has_figures, _tables(text))):
                yield f'{page}, "{heading}"'


def _records(root: Path) -> list[str]:
    patterns = ["benchmarks/*.json", "papers/*.json", "papers/*.jsonl", "papers/records/*.json"]
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return [path.relative_to(root).as_posix() for path in paths]


def _pages(root: Path) -> dict[str, Path]:
    paths = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    return {path.relative_to(root).as_posix(): path for path in paths if path.exists()}


def _measured(root: Path, record: str, table: Mapping[str, Sequence[str]]) -> Sequence[str]:
    rows = [row for row in table if fnmatchcase(record, row)]
    if len(rows) != 1:
        raise TableError(
            f"RECORDS: {record} matches {len(rows)} rows: write one row, with the files and "
            "folders that the record measures"
        )
    if missing := [path for path in table[rows[0]] if not (root / path).exists()]:
        raise TableError(
            f"RECORDS: {rows[0]} measures {', '.join(missing)}, which does not exist: name the "
            "present files and folders"
        )
    return table[rows[0]]


def _origins(file: Path) -> set[Origin]:
    """Return the origins of a record: one, or in JSON Lines the origins of its rows."""
    if file.suffix == ".jsonl":
        found = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        found = [json.loads(file.read_text())["machine"]]
    return {
        Origin(one.get("commit"), tuple(one.get("modified") or ()), one.get("time"))
        for one in found
    }


def _state(root: Path, record: str, measured: Sequence[str]) -> tuple[str, str]:
    """Return the state and its reason. A record is as good as its worst row."""
    judged = [_state_of(root, origin, measured) for origin in _origins(root / record)]
    for state in (STALE, UNPROVEN, CURRENT):
        if reasons := sorted(why for found, why in judged if found == state):
            return state, "; ".join(reasons)
    return UNPROVEN, "has no rows"


def _state_of(root: Path, origin: Origin, measured: Sequence[str]) -> tuple[str, str]:
    if origin.commit is None:
        return UNPROVEN, "no commit" + (f", measured {origin.time[:10]}" if origin.time else "")
    short = origin.commit[:12]
    if _git(root, "cat-file", "-e", f"{origin.commit}^{{commit}}").returncode != 0:
        return UNPROVEN, f"{short} is no commit of this repository"
    changed = _git(root, "diff", "--name-only", "-z", origin.commit, "--", *measured)
    changed.check_returncode()
    if files := changed.stdout.split("\0")[:-1]:
        folders = [one for one in measured if any(_is_in(file, one) for file in files)]
        return STALE, f"{short}, then {len(files)} files changed in {', '.join(folders)}"
    dirty = [file for file in origin.modified if any(_is_in(file, one) for one in measured)]
    if dirty:
        return UNPROVEN, f"{short} with changes in {', '.join(dirty)}"
    return CURRENT, short


def _is_in(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/")


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], text=True, capture_output=True)


def _sections(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield level, heading and text of each section, without its subsections and code blocks."""
    parts = re.split(r"^(#+) +(.+)$", _FENCE.sub("", text), flags=re.MULTILINE)
    for marks, heading, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        yield len(marks), heading, body


def _tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the rows of each table, without the head."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        yield [
            [cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]
        ]


def _has_figures(rows: Sequence[Sequence[str]]) -> bool:
    """Return True if more than half of the cells are numbers. The first column does not count."""
    cells = [cell for row in rows for cell in row[1:]]
    return 2 * sum(bool(_FIGURE.fullmatch(cell)) for cell in cells) > len(cells)


def main() -> int:
    try:
        found = lines(ROOT, RECORDS)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    for line in found:
        pages = f"  ({', '.join(line.pages)})" if line.pages else ""
        print(f"{line.state:8}  {line.record}  {line.why}{pages}")
    for section in without_record(ROOT):
        print(f"no record  {section}")
    counts = Counter(line.state for line in found)
    counted = ", ".join(f"{counts[state]} {state}" for state in (CURRENT, STALE, UNPROVEN))
    without_commit = sum("no commit" in line.why for line in found)
    print(f"{len(found)} records: {counted}; {without_commit} without a commit")
    return 1 if counts[STALE] else 0


if __name__ == "__main__":
    sys.exit(main())
