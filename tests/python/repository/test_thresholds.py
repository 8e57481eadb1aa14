"""docs/design/thresholds.md agrees with the headers csrc/**/tuning.h."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import thresholds  # noqa: E402

HEADER = """\
// Thresholds of a component.
// Measure: `bench`

#pragma once

namespace hbm {

// -- A section, which is no threshold's

// Bytes of a batch.
// Unit: bytes
// Below: waits for more,
// or for a timeout.
// Above: sends a|b.
inline constexpr uint64_t kBatchBytes = uint64_t{3} << 10;

// The time of a retry.
// Below: waits.
// Above: retries.
// Measure: `test`
inline constexpr std::chrono::milliseconds kRetryPeriod{kTries * 1'000u};

// Retries.
// Unit: retries
// Below: goes on.
// Above: fails, by kBatchBytes.
inline constexpr int kTries =
    2;

}  // namespace hbm
"""
ROWS = [
    "| `kBatchBytes` | 3 KiB | Bytes of a batch. | waits for more, or for a timeout. "
    "| sends a\\|b. | `bench` |",
    "| `kRetryPeriod` | 2,000 ms | The time of a retry. | waits. | retries. | `test` |",
    "| `kTries` | 2 retries | Retries. | goes on. | fails, by `kBatchBytes`. | `bench` |",
]


def rows(root: Path, header: str) -> list[str]:
    folder = root / "csrc" / "part"
    folder.mkdir(parents=True)
    (folder / "tuning.h").write_text(header)
    text = thresholds.page(thresholds.read(root))
    return [line for line in text.splitlines() if line.startswith("| `")]


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / thresholds.PAGE).read_text()
    assert written == thresholds.page(thresholds.read(ROOT)), "run python scripts/thresholds.py"


def test_a_page_has_a_row_for_each_threshold(tmp_path: Path) -> None:
    assert rows(tmp_path, HEADER) == ROWS


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("// Thresholds of a component.\n", "", "tuning.h:1: the file must begin"),
        ("// Unit: bytes\n", "", "kBatchBytes must give"),
        ("// Below: waits.\n", "", "kRetryPeriod must give"),
        ("// Measure: `bench`\n", "", "kBatchBytes must give"),
        ("// Below: waits.\n", "// Unit: ms\n// Below: waits.\n", "kRetryPeriod must give"),
        ("kTries * 1'000u", "kOthers", "cannot compute kOthers"),
        ("uint64_t{3} << 10", "sizeof(int)", "cannot compute sizeof"),
        (
            "\n// or for a timeout.\n// Above:",
            " or. Above:",
            "tuning.h:12: the field Above: must begin",
        ),
        ("inline constexpr int", "constexpr int", "expected"),
        ("{kTries * 1'000u};", "{kTries * 1'000u};  // of one", "expected"),
    ],
)
def test_a_fault_is_reported_with_its_line(
    tmp_path: Path, right: str, wrong: str, complaint: str
) -> None:
    assert HEADER.count(right) == 1
    with pytest.raises(thresholds.FormatError, match=re.escape(complaint)):
        rows(tmp_path, HEADER.replace(right, wrong))


@pytest.mark.parametrize("component", thresholds.read(ROOT), ids=lambda one: one.folder)
def test_commands_name_tests_that_exist(component: thresholds.Component) -> None:
    for threshold in component.thresholds:
        for program, pattern in re.findall(
            r"(\w+_test) --gtest_filter=([^ `]+)", threshold.measure
        ):
            source = (ROOT / "tests/native" / f"{program}.cpp").read_text()
            name = pattern.split(".")[-1].strip("*")
            assert name and name in source, f"{threshold.location}: {program} has no {name}"
        for file, name in re.findall(r"pytest ([\w/.]+) -k (\w+)", threshold.measure):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{threshold.location}: no {name}"
