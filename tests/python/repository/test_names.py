"""No class name stands for two things: each is defined once in Python and once in C++.

A Python class may have the name of the C++ class that it wraps, so the languages are apart, and the
stubs of the native modules (*.pyi), which declare C++ classes, are not read.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

Definitions = dict[str, list[str]]  # class name -> where it is defined

# Name -> why it may be defined more than once.
PYTHON_EXCEPTIONS: dict[str, str] = {}
CPP_EXCEPTIONS: dict[str, str] = {}

CPP_SUFFIXES = {".h", ".cpp", ".inc"}
COMMENT_OR_TEXT = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"(\w*)\(.*?\)\1" | "(?:\\.|[^"\\\n])*" | '(?:\\[^']+|[^'\\\n])'""",
    re.DOTALL | re.VERBOSE,
)
# A name with a body behind it; so neither `class X;`, `friend class X;` nor `struct X x{};`. An
# explicit specialization (`struct hash<X> {`) defines no new name.
CPP_DEFINITION = re.compile(
    r"""\b(?:class|struct|union|enum(?:\s+(?:class|struct))?)\s+
    (?:(?:\[\[.*?\]\]|alignas\s*\([^()]*\)|__attribute__\s*\(\(.*?\)\)|[A-Z][A-Z_]+)\s+)*
    (?:\w+::)*(?P<name>(?!final\b)\w+)
    (?:\s+final)?
    \s*(?::(?!:)[^;{}=()]*)?\{""",
    re.DOTALL | re.VERBOSE,
)


def python_classes(text: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def cpp_classes(text: str) -> list[str]:
    """Classes, structs, unions and enums, nested ones too."""
    code = COMMENT_OR_TEXT.sub(" ", text)
    return [match["name"] for match in CPP_DEFINITION.finditer(code)]


def python_definitions(package: Path) -> Definitions:
    files = sorted(package.rglob("*.py"))
    return collected(
        (str(file.relative_to(package)), python_classes(file.read_text())) for file in files
    )


def cpp_definitions(csrc: Path) -> Definitions:
    files = sorted(file for file in csrc.rglob("*") if file.suffix in CPP_SUFFIXES)
    return collected((str(file.relative_to(csrc)), cpp_classes(file.read_text())) for file in files)


def collected(found: Iterable[tuple[str, list[str]]]) -> Definitions:
    definitions: Definitions = defaultdict(list)
    for file, names in found:
        for name in names:
            definitions[name].append(file)
    return definitions


def doubles(definitions: Definitions) -> Definitions:
    return {name: files for name, files in sorted(definitions.items()) if len(files) > 1}


def complaints(found: Definitions, allowed: Iterable[str]) -> list[str]:
    return [
        f"{name} is defined in {', '.join(files)}: give each its own name"
        for name, files in doubles(found).items()
        if name not in set(allowed)
    ]


def test_no_python_class_name_is_defined_twice() -> None:
    found = python_definitions(ROOT / "torch_hbmcomm")
    assert len(found) > 30
    assert complaints(found, PYTHON_EXCEPTIONS) == []
    assert PYTHON_EXCEPTIONS.keys() <= doubles(found).keys(), "an exception that nothing needs"


def test_no_cpp_class_name_is_defined_twice() -> None:
    found = cpp_definitions(ROOT / "csrc")
    assert len(found) > 200
    assert complaints(found, CPP_EXCEPTIONS) == []
    assert CPP_EXCEPTIONS.keys() <= doubles(found).keys(), "an exception that nothing needs"


def test_a_python_double_is_found(tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "lane.py").write_text("class Lane: ...\n\n\nclass Box:\n    pass\n")
    (tmp_path / "lanes.py").write_text("def f():\n    class Inner: ...\n\n\nclass Lane(int): ...\n")
    (tmp_path / "lane.pyi").write_text("class Box: ...\n")
    found = python_definitions(tmp_path)
    assert found.keys() == {"Lane", "Box", "Inner"}
    assert complaints(found, ()) == [
        "Lane is defined in box/lane.py, lanes.py: give each its own name"
    ]
    assert complaints(found, ["Lane"]) == []


def test_a_cpp_double_is_found(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "lane.h").write_text("class Lane {\n  struct State {};\n};\nclass Box;\n")
    (tmp_path / "box.cpp").write_text("struct Box {};\nenum class State { kOpen };\nclass Lane;\n")
    found = cpp_definitions(tmp_path)
    assert complaints(found, ()) == [
        "State is defined in box.cpp, node/lane.h: give each its own name"
    ]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("class A {};", ["A"]),
        ("class A final : public B, private C<D> {};", ["A"]),
        ("struct A\n    : std::enable_shared_from_this<A>,\n      B {\n};", ["A"]),
        ("template <class T, typename U>\nstruct A {};", ["A"]),
        ("struct alignas(kCacheLine) A {};", ["A"]),
        ("struct [[nodiscard]] A {};", ["A"]),
        ("class HBM_EXPORT A {};", ["A"]),
        ("struct UD final {};", ["UD"]),
        ("struct __attribute__((packed)) A { int x; };", ["A"]),
        ("enum class A : uint8_t { kOne };", ["A"]),
        ("enum A { kOne };\nunion B { int x; };", ["A", "B"]),
        ("struct Server::Parts {};", ["Parts"]),
        ("class A {\n  struct B { int x; };\n  enum class C { kOne };\n};", ["A", "B", "C"]),
        ("class A;\nstruct B;\nenum class C : int;", []),
        ("class A {\n  friend class B;\n  friend struct C;\n};", ["A"]),
        ("template <>\nstruct std::hash<A> {};", []),
        ("struct sockaddr_in address{};\nstruct A f() { return {}; }", []),
        ("struct A* next = nullptr; void f(struct A a) {}", []),
        ('// class A {};\n/* struct B {\n}; */\nauto text = "class C {";', []),
        ("auto text = R\"(class A {)\";\nchar brace = '{';\nclass B {};", ["B"]),
        ("enum { kOne };\nstruct { int x; } unnamed;", []),
    ],
)
def test_what_defines_a_cpp_name(code: str, names: list[str]) -> None:
    assert cpp_classes(code) == names
