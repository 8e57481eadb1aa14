"""The commit of the measured code, for records (result.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


def state(file: Path = Path(__file__)) -> dict[str, Any]:
    """Describe the git checkout that tracks `file`, by default the checkout of this package.

    Returns {"commit": hash, "modified": [path, ...]}. The paths are of tracked files that differ
    from the commit, from the root of the repository. Both are None if no checkout tracks `file`, as
    after an installation from a wheel, or without git. Untracked files and the state of the native
    build are not seen.
    """
    file = file.resolve()
    try:
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        commit = _git(file.parent, "rev-parse", "HEAD").strip()
        modified = _git(file.parent, "diff", "--name-only", "-z", "HEAD").split("\0")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": None}
    return {"commit": commit, "modified": modified}


def _git(folder: Path, *arguments: str) -> str:
    """Run git, which by itself refuses the checkout of another user, as of root under sudo."""
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout
