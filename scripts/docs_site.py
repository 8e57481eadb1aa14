"""Gives mkdocs the files of the site (a hook of mkdocs.yml).

The site consists of the repository's Markdown files, at their own paths, with README.md as the
first page. It also has every other file of the repository that a page links to: pictures, examples,
measured data. scripts/site/ has the site's style sheet and templates.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "papers/README.md",
    "papers/records/report.md",
    "examples/README.md",
    "docs/**/*.md",
]
FENCE = re.compile(r"^```(\w*)$(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Replace the files of docs_dir by the repository's pages and the files that the pages link to.

    Files that the theme and plugins have added stay.
    """
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    linked_files = [target for page in pages for target in linked(page)]
    styles = [path for name in config.extra_css if (path := ROOT / name).is_file()]
    for path in dict.fromkeys([*pages, *linked_files, *styles]):
        uri = path.relative_to(ROOT).as_posix()
        site.append(File.generated(config, uri, abs_src_path=str(path)))
    return site


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Give code blocks without a language the language "text".

    So the commands and outputs in pages stay plain. Examples in docstrings keep the default
    language of mkdocs.yml, which is Python.
    """
    return FENCE.sub(lambda block: f"```{block[1] or 'text'}{block[2]}```", markdown)


def linked(page: Path) -> list[Path]:
    """Return the files of the repository that a page links to, in order."""
    targets = [(page.parent / target).resolve() for target in LINK.findall(page.read_text())]
    return [path for path in targets if path.is_file() and path.is_relative_to(ROOT)]
