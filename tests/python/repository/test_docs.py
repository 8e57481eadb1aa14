"""The documents agree with the repository: their links, anchors, paths and names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = {"csrc", "torch_hbmcomm", "scripts"}

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
PATH = re.compile(
    r"(?<![\w./-])((?:csrc|torch_hbmcomm|tests|scripts|benchmarks|papers|examples|docs)/"
    r"[\w./*-]*[\w*])"
)
MODULE = re.compile(r"python3? +-m +((?:torch_hbmcomm|benchmarks|papers)(?:\.(?!NAME\b)\w+)+)")
PAGE = re.compile(r"(?<![\w./-])(?:docs|benchmarks|papers|examples)/[\w/-]+\.md")
# In backticks: Class::member, Class.member, kConstant, or a name of at least two capitalised words.
NAME = re.compile(r"\w+(?:::\w+)+|\bk[A-Z]\w+|\b[A-Z][a-z]\w*[A-Z]\w*(?:\.\w+)?")
SOURCES = {".cpp", ".h", ".inc", ".py", ".pyi", ".c", ".sh", ".map", ".txt", ""}


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks or would add: no ignored files, no nested checkouts."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(path for line in listed.splitlines() if (path := ROOT / line).is_file())


DOCUMENTS = tracked("*.md")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates for the headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        numbered = (f"{slug}-{n}" for n in range(1, 100))
        found.add(slug if slug not in found else next(s for s in numbered if s not in found))
    return found


def broken_links(document: Path) -> Iterator[str]:
    text = document.read_text()
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists():
            yield f"{name_of(document)} links to {link}, which does not exist"
        elif target.is_dir():
            yield f"{name_of(document)} links to {link}, a directory: the site has files alone"
        elif anchor and anchor not in anchors(target.read_text()):
            yield f"{name_of(document)} links to {link}; {name_of(target)} has no such heading"


def missing_paths(document: Path) -> Iterator[str]:
    for path in dict.fromkeys(PATH.findall(document.read_text())):
        if not any(ROOT.glob(path)):
            yield f"{name_of(document)} names {path}, which does not exist"


def sources() -> list[Path]:
    places = ["csrc", "torch_hbmcomm", "tests", "benchmarks", "papers", "examples", "scripts"]
    own = Path(__file__).resolve()
    return [path for path in tracked(*places, "Makefile") if path.suffix in SOURCES and path != own]


@cache
def words_of_the_sources() -> frozenset[str]:
    return frozenset(word for path in sources() for word in re.findall(r"\w+", path.read_text()))


def missing_names(document: Path) -> Iterator[str]:
    text = FENCE.sub("", document.read_text())
    for code in dict.fromkeys(CODE.findall(text)):
        for name in NAME.findall(code):
            if lost := set(re.findall(r"\w+", name)) - words_of_the_sources():
                yield f"{name_of(document)} names {name}: no source has {', '.join(sorted(lost))}"


def require_none(complaints: Iterable[str]) -> None:
    text = "\n".join(complaints)
    assert not text, text


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_link_targets_exist(document: Path) -> None:
    require_none(broken_links(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_exist(document: Path) -> None:
    require_none(missing_paths(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_names_are_in_the_sources(document: Path) -> None:
    require_none(missing_names(document))


def test_sources_name_documents_that_exist() -> None:
    require_none(
        f"{name_of(file)} names {page}, which does not exist"
        for file in sources()
        for page in PAGE.findall(file.read_text())
        if not (ROOT / page).is_file()
    )


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_commands_name_modules_that_exist() -> None:
    require_none(
        f"{name_of(file)} names python -m {module}, which does not exist"
        for file in [*DOCUMENTS, *sources()]
        for module in MODULE.findall(file.read_text())
        if not is_module(module)
    )


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    pages = [name for path in DOCUMENTS if (name := name_of(path)).startswith("docs/")]
    assert [page for page in pages if page not in site] == []


def test_every_environment_variable_is_listed() -> None:
    listed = (ROOT / "docs/environment.md").read_text()
    read = re.compile(r'"(HBMCOMM_[A-Z_]+)"')
    product = [path for path in sources() if path.parts[len(ROOT.parts)] in PRODUCT]
    found = {name for path in product for name in read.findall(path.read_text())}
    assert found
    require_none(
        f"docs/environment.md lacks {name}" for name in sorted(found) if name not in listed
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[x](missing.md)", "page.md links to missing.md, which does not exist"),
        ("# A `b`, c\n[x](#a-c)", "page.md links to #a-c; docs/page.md has no such heading"),
        ("see csrc/no/such.h.", "page.md names csrc/no/such.h, which does not exist"),
        ("[x](../docs)", "page.md links to ../docs, a directory: the site has files alone"),
        ("`NoSuch::thing()`", "page.md names NoSuch::thing: no source has NoSuch"),
    ],
)
def test_faults_of_a_page_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    words_of_the_sources()  # cached here, while ROOT is the repository
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(text)
    found = [*broken_links(page), *missing_paths(page), *missing_names(page)]
    assert [f"docs/{complaint}"] == found
