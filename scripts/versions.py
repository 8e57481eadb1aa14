"""The version of a release: torch_hbmcomm/version.py, CHANGELOG.md and the tag agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_VERSION = re.compile(r'^__version__ = "((\d+\.\d+\.\d+)(\.dev\d+)?)"$', re.MULTILINE)


class Mismatch(ValueError):
    """Two places state different versions. The text names both, and the remedy."""


def of_package(root: Path = ROOT) -> str:
    """Return the version in torch_hbmcomm/version.py, as in "0.2.0" or "0.2.0.dev0"."""
    return _found(root)[0]


def check(root: Path, tag: str | None) -> str:
    """Return the version if all places state it. Raises Mismatch.

    tag: the tag of a release, "v" and the version. None: no release, so the version may be of a
        development, with the changelog's heading "Unreleased (0.2.0)".
    """
    version, number = _found(root)
    heading = next(iter(re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.M)), "")
    if tag is not None and version != number:
        raise Mismatch(
            f"the tag is {tag}, and torch_hbmcomm/version.py has {version}, a development version: "
            "write the version of the release there first"
        )
    if tag is not None and tag != f"v{version}":
        raise Mismatch(
            f"the tag is {tag}, and torch_hbmcomm/version.py has {version}: correct the file, or "
            f"push the tag v{version}"
        )
    expected = number if version == number else f"Unreleased ({number})"
    if not re.match(rf"{re.escape(expected)}(?![\w.])", heading):
        raise Mismatch(
            f"torch_hbmcomm/version.py has {version}, and the first heading of CHANGELOG.md is "
            f'"{heading}": begin the heading with "{expected}"'
        )
    return version


def _found(root: Path) -> tuple[str, str]:
    """Return the version in the file, and the version without its suffix of a development."""
    text = (root / "torch_hbmcomm" / "version.py").read_text()
    match = _VERSION.search(text)
    if match is None:
        raise Mismatch(
            'torch_hbmcomm/version.py has no line `__version__ = "N.N.N"`, or with N.N.N.devN'
        )
    return match[1], match[2]
