"""Lays the virtual environment given as the argument on top of this interpreter's own: it sees all
that is installed here, and pip adds to it only what is missing or has another version.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main(upper: Path) -> None:
    here = sysconfig.get_path("purelib")
    there = sysconfig.get_path("purelib", vars={"base": str(upper)})
    # addsitedir, unlike a path alone, reads the .pth files of editable installations.
    Path(there, "layer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for entry in Path(sys.prefix, "lib").iterdir():  # the MPI library, where mpi4py looks for it
        link = upper / "lib" / entry.name
        if not link.exists():
            link.symlink_to(entry)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
