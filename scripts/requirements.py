"""Prints the package's requirements, one a line, for pip to install before it builds the package.

The output has the requirements of the build, of the package with the development release of
PyTorch, and of the extras named as arguments. With --extras-only it has only the requirements of
the extras. With --build it lacks the package's requirements. --torch 2.15.0 adds this release of
PyTorch, instead of the development release.
"""

import argparse
import sys
from pathlib import Path

import torch_releases
from dependencies import dependencies

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def requirements(
    extras: list[str], *, extras_only: bool = False, build: bool = False, torch: str | None = None
) -> list[str]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = []
    if not extras_only:
        lines += pyproject["build-system"]["requires"]
    if not extras_only and not build:
        minor = int(torch.split(".")[1]) if torch else torch_releases.DEVELOPMENT
        lines += dependencies([minor])
    if torch:
        lines.append(f"torch=={torch}")
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("extras", nargs="*")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--extras-only", action="store_true")
    which.add_argument("--build", action="store_true")
    parser.add_argument("--torch")
    print("\n".join(requirements(**vars(parser.parse_args()))))
