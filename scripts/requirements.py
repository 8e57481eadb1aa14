"""Prints the requirements, one a line: the build's, the package's, and those of the extras named as
arguments. pip can then install them before the package is built.
"""

import sys
from pathlib import Path

from dependencies import dependencies

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def requirements(extras: list[str]) -> list[str]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = [*pyproject["build-system"]["requires"], *dependencies()]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
