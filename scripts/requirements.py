"""Prints the requirements, one a line: the build's, the package's with the PyTorch of development,
and those of the extras named as arguments. pip can then install them before the package is built.
With --extras-only first, those of the extras alone.
"""

import sys
from pathlib import Path

import torch_releases
from dependencies import dependencies

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def requirements(extras: list[str], *, extras_only: bool = False) -> list[str]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = []
    if not extras_only:
        lines += pyproject["build-system"]["requires"]
        lines += dependencies([torch_releases.DEVELOPMENT])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    extras_only = sys.argv[1:2] == ["--extras-only"]
    print("\n".join(requirements(sys.argv[1 + extras_only :], extras_only=extras_only)))
