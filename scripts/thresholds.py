"""Writes docs/design/thresholds.md from the headers csrc/**/tuning.h.

Each component has one such header, with thresholds and nothing else. Its first comment introduces
the component. Each threshold is a comment and one statement:

    // The decision.
    // Unit: bytes
    // Below: the behaviour for smaller quantities, or the cost of a smaller value.
    // Above: the behaviour for larger quantities, or the cost of a larger value.
    // Measure: `command, from the root of the repository`
    inline constexpr uint64_t kNameBytes = 64 << 10;

- The fields have this order. Each begins a line of the comment and continues on the next lines.
- A duration of std::chrono takes its unit from its type, and has no `Unit:`. The page shows "bytes"
  as KiB or MiB, any other unit as it is written.
- `Measure:` names a benchmark or, if there is none, a test with values on both sides of the
  threshold. A `Measure:` in the first comment of the file is for all thresholds without one.
- The value consists of numbers, + - * / << >>, parentheses, casts like size_t{1}, and other
  thresholds' names.
- Versions, flags, layouts, masks, and lengths that the kernel or a standard sets are no thresholds:
  they belong elsewhere.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/design/thresholds.md"
INTRODUCTION = """\
# Thresholds

The C++ decides by these thresholds. Each component keeps its own in its `tuning.h`.
`python scripts/thresholds.py` writes this page from those headers, and its first lines give their
format. Edit the headers, not the page. *Below* and *above* give the behaviour on either side of the
value, or the cost of a smaller and a larger value. Native tests are in `build/cpython-3XX` after
`make native`.
"""
HEADER = "| threshold | value | decides | below | above | measured by |"

FIELD = re.compile(r"(Unit|Below|Above|Measure): *(.*)")
MERGED = re.compile(r"^//.*\S +(Unit|Below|Above|Measure):")  # clang-format joins lines like this
STATEMENT = re.compile(
    r"inline constexpr ([\w:]+) (k[A-Z]\w*)(?:\{(?P<braced>.+)\}| = (?P<assigned>.+));"
)
CONSTANT = re.compile(r"(?<![\w`])k[A-Z]\w*(?![\w`])")
DURATIONS = {
    "nanoseconds": "ns",
    "microseconds": "us",
    "milliseconds": "ms",
    "seconds": "s",
    "minutes": "min",
    "hours": "h",
}
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.LShift: lambda left, right: int(left) << int(right),
    ast.RShift: lambda left, right: int(left) >> int(right),
}


class Threshold(NamedTuple):
    location: str  # file:line
    name: str
    value: str  # as in the source
    decision: str
    unit: str
    below: str
    above: str
    measure: str


class Component(NamedTuple):
    folder: str
    introduction: str
    thresholds: list[Threshold]


class FormatError(ValueError):
    """A tuning.h does not follow the format. The text names the line and the fault."""


def read(root: Path) -> list[Component]:
    """Return the components that have a tuning.h. Raises FormatError."""
    return [_component(root, path) for path in sorted(root.glob("csrc/**/tuning.h"))]


def page(components: list[Component]) -> str:
    """Return the text of the page. Raises FormatError if a value cannot be computed."""
    thresholds = [each for component in components for each in component.thresholds]
    sections = [INTRODUCTION]
    for component in components:
        rows = "".join(_row(each, thresholds) for each in component.thresholds)
        sections.append(
            f"## `{component.folder}`\n\n{component.introduction}\n\n{HEADER}\n"
            f"{re.sub('[^|]+', ' --- ', HEADER)}\n{rows}"
        )
    return "\n".join(sections)


def _component(root: Path, path: Path) -> Component:
    name = path.relative_to(root).as_posix()
    lines = path.read_text().splitlines()
    for at, line in enumerate(lines):
        if merged := MERGED.search(line):
            raise FormatError(f"{name}:{at + 1}: the field {merged[1]}: must begin a line")
    code = next((at for at, line in enumerate(lines) if not line.startswith("//")), len(lines))
    first = _comment_above(lines, code)
    if not first.get(""):
        raise FormatError(f"{name}:1: the file must begin with a comment on the component")
    found = [
        _threshold(f"{name}:{at + 1}", statement, _comment_above(lines, at), first.get("Measure"))
        for at, statement in _statements(name, lines)
    ]
    if not found:
        raise FormatError(f"{name}: has no threshold")
    return Component(path.parent.relative_to(root).as_posix(), first[""], found)


def _comment_above(lines: list[str], at: int) -> dict[str, str]:
    """Return the comment directly above line `at`, as the text of each field.

    The text before the first field has the name "".
    """
    first = at
    while first > 0 and lines[first - 1].startswith("//"):
        first -= 1
    fields: dict[str, str] = {}
    name = ""
    for line in lines[first:at]:
        text = line.removeprefix("//").strip()
        if match := FIELD.fullmatch(text):
            name, text = match.groups()
        fields[name] = f"{fields.get(name, '')} {text}".strip()
    return fields


def _statements(name: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    at = 0
    while at < len(lines):
        first = at
        at += 1
        if lines[first].startswith("//") or "constexpr" not in lines[first]:
            continue
        while not lines[at - 1].endswith(";"):
            if at == len(lines):
                raise FormatError(
                    f"{name}:{first + 1}: no line ends with the statement's semicolon"
                )
            at += 1
        yield first, " ".join(line.strip() for line in lines[first:at])


def _threshold(
    location: str, statement: str, fields: dict[str, str], measure: str | None
) -> Threshold:
    match = STATEMENT.fullmatch(statement)
    if match is None:
        raise FormatError(
            f"{location}: expected `inline constexpr TYPE kName = VALUE;`: {statement}"
        )
    name = match[2]
    if measure:
        fields.setdefault("Measure", measure)
    unit = DURATIONS.get(match[1].removeprefix("std::chrono::"))
    expected = ["", *([] if unit else ["Unit"]), "Below", "Above", "Measure"]
    if list(fields) != expected or not all(fields.values()):
        wanted = ", ".join(f"{field}:" if field else "the decision" for field in expected)
        raise FormatError(f"{location}: the comment of {name} must give {wanted}, in this order")
    return Threshold(
        location,
        name,
        match["braced"] or match["assigned"],
        fields[""],
        unit or fields["Unit"],
        fields["Below"],
        fields["Above"],
        fields["Measure"],
    )


def _row(threshold: Threshold, thresholds: list[Threshold]) -> str:
    value = _shown(_computed(threshold, thresholds), threshold.unit)
    cells = [
        f"`{threshold.name}`",
        value,
        _with_code(threshold.decision),
        _with_code(threshold.below),
        _with_code(threshold.above),
        threshold.measure,
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _with_code(text: str) -> str:
    """Return the text with the constants' names in backticks.

    The page's tables can break a line within code, but not within a plain word.
    """
    return CONSTANT.sub(r"`\g<0>`", text)


def _computed(threshold: Threshold, thresholds: list[Threshold]) -> float:
    """Return the threshold's value. A name in it means another threshold.

    If several files have a threshold of this name, it means the one in the same file.
    """

    def compute(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](compute(node.left), compute(node.right))
        if isinstance(node, ast.Name):
            found = [each for each in thresholds if each.name == node.id]
            file = threshold.location.split(":")[0]
            own = [each for each in found if each.location.split(":")[0] == file]
            if len(own or found) == 1:
                return _computed((own or found)[0], thresholds)
        raise FormatError(f"{threshold.location}: cannot compute {ast.unparse(node)}")

    text = re.sub(r"\b(?:std::)?(?:size_t|u?int(?:32|64)_t)\{([^{}]*)\}", r"(\1)", threshold.value)
    text = re.sub(r"(?<=\d)'(?=\d)|(?<=\d)[uUlL]+\b|\b(?:\w+::)+", "", text)
    try:
        return compute(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise FormatError(f"{threshold.location}: cannot compute {threshold.value}") from error


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        for shift, prefixed in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value >= 1 << shift and value % (1 << shift) == 0:
                return f"{int(value) >> shift:,} {prefixed}"
    return f"{value:,} {unit}"


def main() -> None:
    try:
        if len(sys.argv) > 1:  # prints the page of that repository
            print(page(read(Path(sys.argv[1]))), end="")
        else:
            (ROOT / PAGE).write_text(page(read(ROOT)))
    except FormatError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
